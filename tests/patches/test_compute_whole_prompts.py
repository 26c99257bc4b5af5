"""The generator's scheduler: a request ends when its prompt was computed, and its worker hears of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.patches.conftest import Apply
from tests.patches.old_consumer import import_old_consumer
from vllm_overlay.errors import OverlayError
from vllm_overlay.patches.compute_whole_prompts import PATCH, WholePrompts


class Scheduler:
    """Requests of (computed, prompt) tokens; `left` is what the next step schedules."""

    def __init__(self, requests: dict[str, tuple[int, int]], left: int = 0) -> None:
        self.requests = {
            key: SimpleNamespace(request_id=key, num_computed_tokens=computed, num_prompt_tokens=prompt)
            for key, (computed, prompt) in requests.items()
        }
        self.left = left
        self.finished_req_ids: set[str] = set()
        self.cache_config = SimpleNamespace(num_gpu_blocks=7)

    def schedule(self) -> Any:
        carried, self.finished_req_ids = self.finished_req_ids, set()
        return SimpleNamespace(total_num_scheduled_tokens=self.left, finished_req_ids=carried)

    def finish_requests(self, request_ids: list[str], finished_status: Any) -> None:
        for key in request_ids:
            if self.requests.pop(key, None) is not None:
                self.finished_req_ids.add(key)


def test_only_requests_whose_prompt_was_computed_end() -> None:
    scheduler = Scheduler({"whole": (5, 5), "chunk": (3, 5)})
    ours = WholePrompts(scheduler)
    ours.finish_requests(["whole"], "aborted")
    ours.finish_requests("chunk", "aborted")
    ours.finish_requests(["unknown"], "aborted")
    assert list(scheduler.requests) == ["chunk"]


def test_the_ids_of_the_last_requests_go_with_the_next_step_that_is_executed() -> None:
    scheduler = Scheduler({"last": (5, 5)})
    ours = WholePrompts(scheduler)
    ours.finish_requests(["last"], "aborted")
    assert ours.schedule().total_num_scheduled_tokens == 0  # the generator's loop ends and does not execute it
    scheduler.left = 1
    assert ours.schedule().finished_req_ids == {"last"}
    assert ours.schedule().finished_req_ids == set()


def test_a_prompt_that_finds_no_room_is_an_error_and_does_not_stay() -> None:
    pytest.importorskip("vllm")
    scheduler = Scheduler({"big": (16, 500), "behind": (0, 3)})
    with pytest.raises(OverlayError, match="request 'big': its prompt of 500 tokens finds no room in a KV cache of 7"):
        WholePrompts(scheduler).schedule()
    assert scheduler.requests == {}


def test_everything_else_is_the_schedulers_own() -> None:
    scheduler = Scheduler({"a": (0, 1)}, left=3)
    ours = WholePrompts(scheduler)
    assert ours.requests is scheduler.requests
    with pytest.raises(AttributeError):
        ours.no_such_thing  # noqa: B018


def test_the_generator_gets_it(apply: Apply) -> None:
    generator = import_old_consumer("vllm_hidden_states_generator")
    from vllm.v1.core.sched import scheduler

    apply(PATCH)
    assert type(generator.Scheduler).__name__ == "FunctionWrapper"
    assert generator.Scheduler.__wrapped__ is scheduler.Scheduler
