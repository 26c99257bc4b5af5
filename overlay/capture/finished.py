"""The engine's side of capture: which requests finished, how long they were, and why they ended."""

from __future__ import annotations

import atexit
import itertools
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, ref

# Far above what a writer's bounded backlog takes on a slow disk, and a bound all the same: a dead worker never answers.
CLOSE_TIMEOUT_S = 300.0


@dataclass(frozen=True)
class FinishedRequest:
    """`num_tokens` counts prompt and generated tokens; `reason` is vLLM's: stop, length, abort, error."""

    num_tokens: int
    reason: str
    # The how many-th ended request of its process: an id may be used again (before 0.14, or when vLLM is told so).
    serial: int = field(default=0, compare=False)


class FinishedRequests(set[str]):
    """vLLM's `finished_req_ids`, with what is known of each id beside it. Survives vLLM's own pickling to workers."""

    def __init__(self, ids: Iterable[str] = (), facts: Mapping[str, FinishedRequest] | None = None) -> None:
        super().__init__(ids)
        self.facts = dict(facts or {})


@dataclass
class _Notes:
    """Of one scheduler: ended requests that no step has carried yet, and those that the last steps carried."""

    waiting: dict[str, FinishedRequest] = field(default_factory=dict)
    # A signal may end the engine between a step's schedule and its work in the worker, so what was sent last is told
    # again at the end. More steps than any batch queue is deep.
    sent: deque[dict[str, FinishedRequest]] = field(default_factory=lambda: deque(maxlen=16))


_SERIALS = itertools.count(1)
_NOTES: WeakKeyDictionary[Any, _Notes] = WeakKeyDictionary()
_CLOSED: WeakSet[Any] = WeakSet()


def note_finished(scheduler: Any, request: Any) -> None:
    """Remember a request that the scheduler is about to free."""
    facts = FinishedRequest(int(request.num_tokens), str(request.get_finished_reason()), next(_SERIALS))
    # Not the later one of two of the same id: no step has told of the first, so none had computed the second.
    _NOTES.setdefault(scheduler, _Notes()).waiting.setdefault(request.request_id, facts)


def take_finished(scheduler: Any) -> dict[str, FinishedRequest]:
    """What was noted since the last call, to be carried by a step."""
    notes = _NOTES.setdefault(scheduler, _Notes())
    taken, notes.waiting = notes.waiting, {}
    notes.sent.append(taken)
    return taken


def close_workers(executor: Any, scheduler: Any) -> None:
    """Tell the workers of requests that no step, or only the last steps, carried to them; they close their stores.

    Errors: whatever a worker raises while it writes, as `collective_rpc` reports it.
    """
    if executor is None or scheduler in _CLOSED:
        return
    _CLOSED.add(scheduler)
    ended = _list_noted(_NOTES.setdefault(scheduler, _Notes()))
    try:
        executor.collective_rpc("overlay_close", timeout=CLOSE_TIMEOUT_S, args=(ended,))
    except SystemExit:
        # vLLM raises it once, from its handler of SIGTERM, wherever this process is; closing twice is closing once.
        executor.collective_rpc("overlay_close", timeout=CLOSE_TIMEOUT_S, args=(ended,))
        raise


def close_at_exit(engine: Any) -> None:
    """Close the engine's workers when this process exits, if the engine still lives and was not shut down before."""
    atexit.register(_close_if_alive, ref(engine))


def _close_if_alive(engine_ref: ref[Any]) -> None:
    engine = engine_ref()
    if engine is not None:
        close_workers(engine.model_executor, engine.scheduler)


def noted_in_this_process() -> list[tuple[str, int, str, int]]:
    """The same of every scheduler that lives in this process, as (key, tokens, reason, serial)."""
    return [ended for notes in list(_NOTES.values()) for ended in _list_noted(notes)]


def _list_noted(notes: _Notes) -> list[tuple[str, int, str, int]]:
    every = [(key, fact) for carried in [*notes.sent, notes.waiting] for key, fact in carried.items()]
    return [(key, fact.num_tokens, fact.reason, fact.serial) for key, fact in every]
