"""The engine's side of capture: which requests finished, how long they were, and why they ended."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

# Far above what a writer's bounded backlog takes on a slow disk, and a bound all the same: a dead worker never answers.
CLOSE_TIMEOUT_S = 300.0


@dataclass(frozen=True)
class FinishedRequest:
    """`num_tokens` counts prompt and generated tokens; `reason` is vLLM's: stop, length, abort, error."""

    num_tokens: int
    reason: str


class FinishedRequests(set[str]):
    """vLLM's `finished_req_ids`, with what is known of each id beside it. Survives vLLM's own pickling to workers."""

    def __init__(self, ids: Iterable[str] = (), facts: Mapping[str, FinishedRequest] | None = None) -> None:
        super().__init__(ids)
        self.facts = dict(facts or {})


_NOTED: WeakKeyDictionary[Any, dict[str, FinishedRequest]] = WeakKeyDictionary()


def note_finished(scheduler: Any, request: Any) -> None:
    """Remember a request that the scheduler is about to free."""
    facts = FinishedRequest(int(request.num_tokens), str(request.get_finished_reason()))
    _NOTED.setdefault(scheduler, {})[request.request_id] = facts


def take_finished(scheduler: Any) -> dict[str, FinishedRequest]:
    """What was noted since the last call; it is forgotten here."""
    return _NOTED.pop(scheduler, {})


def close_workers(executor: Any, scheduler: Any) -> None:
    """Tell the workers of requests whose end no step has carried to them, and have them close their stores.

    Errors: whatever a worker raises while it writes, as `collective_rpc` reports it.
    """
    if executor is None:
        return
    ended = [(key, fact.num_tokens, fact.reason) for key, fact in take_finished(scheduler).items()]
    executor.collective_rpc("overlay_close", timeout=CLOSE_TIMEOUT_S, args=(ended,))
