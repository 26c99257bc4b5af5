"""Capture into memory: in whatever order the runner computes, each prompt gets its own rows or an error names one.

The ruler: a row's first value is its request and its second its position, so that any mix-up shows what was crossed.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from vllm_overlay.capture.memory import MemoryCapture
from vllm_overlay.capture.recorder import CaptureError
from vllm_overlay.capture.rows import RowError
from vllm_overlay.capture.taps import Taps

LAYER_IDS = (2, 5)


class Runner:
    """A worker, its seam and its model at once: `run` is one step, its rows in the order of `order`."""

    def __init__(self) -> None:
        self.buffer = torch.zeros(64, len(LAYER_IDS), 3)
        self.order: tuple[str, ...] = ()
        self.tokens = torch.zeros(64, dtype=torch.int32)
        self.known: set[str] = set()
        seam: Any = SimpleNamespace(step_order=lambda worker: self.order, step_token_ids=lambda worker: self.tokens)
        self.capture = MemoryCapture(LAYER_IDS, Taps(LAYER_IDS, self.buffer, ()), seam)

    def run(self, scheduled: dict[str, tuple[int, int]], prompts: dict[str, int], order: tuple[str, ...]) -> None:
        """`scheduled`: (first position, positions computed) by request, in the scheduler's order."""
        new = [key for key in scheduled if key not in self.known]
        cached = [key for key in scheduled if key in self.known]
        self.known.update(new)
        step = SimpleNamespace(
            total_num_scheduled_tokens=sum(count for _, count in scheduled.values()),
            num_scheduled_tokens={key: count for key, (_, count) in scheduled.items()},
            scheduled_new_reqs=[
                SimpleNamespace(
                    req_id=key, prompt_token_ids=tokens_of(key, prompts[key]), num_computed_tokens=scheduled[key][0]
                )
                for key in new
            ],
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=cached, num_computed_tokens=[scheduled[key][0] for key in cached]
            ),
        )
        self.capture.prepare_step(step)
        self.order, row = order, 0
        for key in order:
            start, count = scheduled[key]
            for position in range(start, start + count):
                self.tokens[row] = tokens_of(key, prompts[key])[position]
                for column, layer in enumerate(LAYER_IDS):
                    self.buffer[row, column] = torch.tensor([number_of(key) + 1, position, layer])
                row += 1
        self.capture.record_step(None, step)


def number_of(key: str) -> int:
    return int(key.rsplit("_", 1)[1])


def tokens_of(key: str, length: int) -> list[int]:
    return [10 * (number_of(key) + 1) + position for position in range(length)]


def check(states: list[torch.Tensor] | None, lengths: list[int]) -> None:
    """The caller's cutting: by the prompts' lengths, one after the other."""
    assert states is not None
    for layer, together in zip(LAYER_IDS, states, strict=True):
        expected = [[number + 1, position, layer] for number, n in enumerate(lengths) for position in range(n)]
        assert together.tolist() == expected


@pytest.fixture
def runner() -> Runner:
    runner = Runner()
    runner.capture.begin()
    return runner


def test_chunks_and_a_reordered_batch(runner: Runner) -> None:
    """Prompts of 5, 3 and 4: the second is computed in two steps, and the runner takes its own order."""
    prompts = {"req_0_0": 5, "req_0_1": 3, "req_0_2": 4}
    runner.run({"req_0_0": (0, 5), "req_0_1": (0, 1)}, prompts, ("req_0_1", "req_0_0"))
    runner.run({"req_0_1": (1, 2), "req_0_2": (0, 4)}, prompts, ("req_0_2", "req_0_1"))
    check(runner.capture.collect(), [5, 3, 4])


def test_the_scheduler_may_begin_a_later_prompt_first(runner: Runner) -> None:
    """0.11 does, where the earlier one does not fit into the step; and 10 comes after 2 (CASES 2)."""
    keys = [f"req_7_{number}" for number in range(11)]
    for key in reversed(keys):
        runner.run({key: (0, 2)}, {key: 2}, (key,))
    check(runner.capture.collect(), [2] * 11)


def test_preemption_recomputes_and_the_last_row_wins(runner: Runner) -> None:
    """CASES 5, in both runners' ways of telling."""
    prompts = {"req_0_0": 4, "req_0_1": 2}
    runner.run({"req_0_0": (0, 3)}, prompts, ("req_0_0",))
    runner.run({"req_0_0": (0, 4)}, prompts, ("req_0_0",))
    runner.run({"req_0_1": (0, 1)}, prompts, ("req_0_1",))
    runner.known.discard("req_0_1")  # Model Runner V2 is sent it again as new
    runner.run({"req_0_1": (0, 2)}, prompts, ("req_0_1",))
    check(runner.capture.collect(), [4, 2])


def test_a_position_without_a_row_is_named(runner: Runner) -> None:
    """A cached prefix is never a short result."""
    runner.run({"req_0_0": (2, 3)}, {"req_0_0": 5}, ("req_0_0",))
    with pytest.raises(CaptureError, match=r"request 'req_0_0', position 0: .*\(2 of 5 rows are missing\)"):
        runner.capture.collect()


def test_an_unfinished_prompt_is_named(runner: Runner) -> None:
    runner.run({"req_0_0": (0, 3)}, {"req_0_0": 5}, ("req_0_0",))
    with pytest.raises(CaptureError, match="request 'req_0_0', position 3"):
        runner.capture.collect()


def test_nothing_of_an_earlier_call_is_left(runner: Runner) -> None:
    runner.run({"req_0_0": (0, 5)}, {"req_0_0": 5}, ("req_0_0",))
    runner.capture.begin()
    runner.run({"req_1_0": (0, 2)}, {"req_1_0": 2}, ("req_1_0",))
    check(runner.capture.collect(), [2])
    assert runner.capture.collect() is None


def test_a_request_of_an_earlier_call_that_still_runs_is_refused(runner: Runner) -> None:
    runner.run({"req_0_0": (0, 2)}, {"req_0_0": 5}, ("req_0_0",))
    runner.capture.begin()
    with pytest.raises(RowError, match="'req_0_0', which no step announced"):
        runner.run({"req_0_0": (2, 3)}, {"req_0_0": 5}, ("req_0_0",))


def test_invented_requests_of_a_warm_up_are_left_out() -> None:
    runner = Runner()
    runner.run({"warm_0": (0, 3)}, {"warm_0": 3}, ("warm_0",))
    assert runner.capture.collect() is None


def test_a_tap_that_does_not_fire_is_an_error(runner: Runner) -> None:
    """CASES 9: the buffer is poisoned before every step."""
    step = SimpleNamespace(
        total_num_scheduled_tokens=1,
        num_scheduled_tokens={"req_0_0": 1},
        scheduled_new_reqs=[SimpleNamespace(req_id="req_0_0", prompt_token_ids=[1], num_computed_tokens=0)],
        scheduled_cached_reqs=SimpleNamespace(req_ids=[], num_computed_tokens=[]),
    )
    runner.order, runner.tokens[0] = ("req_0_0",), 1
    runner.buffer.fill_(1.0)
    runner.capture.prepare_step(step)
    with pytest.raises(CaptureError, match="request 'req_0_0', position 0, layer 2: the row is not finite"):
        runner.capture.record_step(None, step)


def test_rows_of_other_tokens_than_the_prompts_are_refused(runner: Runner) -> None:
    """The runner's order and what it computed disagree: rows would be crossed."""
    prompts = {"req_0_0": 2, "req_0_1": 2}
    new = [SimpleNamespace(req_id=key, prompt_token_ids=tokens_of(key, 2), num_computed_tokens=0) for key in prompts]
    step = SimpleNamespace(
        total_num_scheduled_tokens=4,
        num_scheduled_tokens=prompts,
        scheduled_new_reqs=new,
        scheduled_cached_reqs=SimpleNamespace(req_ids=[], num_computed_tokens=[]),
    )
    runner.order = ("req_0_1", "req_0_0")
    runner.tokens[:4] = torch.from_numpy(np.array(tokens_of("req_0_0", 2) + tokens_of("req_0_1", 2)))
    runner.buffer.fill_(1.0)
    with pytest.raises(CaptureError, match="expected the prompt's token 20, found 10"):
        runner.capture.record_step(None, step)
