"""0.11.0's executor with a second phase: both ways of asking for it, blocking and not."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from tests.patches.conftest import ApplyShim
from tests.patches.steps import Step
from vllm_overlay.patches.split_steps import PATCH, build, build_sample_tokens


class Executor:
    """As 0.11.0's: one phase, and a future if it may not block."""

    @build
    def execute_model(self, scheduler_output: Step, non_block: bool = False) -> Any:
        if not non_block:
            return "output"
        done: Future[Any] = Future()
        done.set_result("output")
        return done

    sample_tokens: Any = build_sample_tokens()


def test_a_step_is_given_in_either_phase() -> None:
    executor = Executor()
    assert executor.execute_model(Step()) == "output"
    assert executor.sample_tokens(None) == "output"
    executor.execute_model(Step(), non_block=True)
    assert executor.sample_tokens(None) == "output"
    executor.execute_model(Step())
    assert executor.sample_tokens(None, non_block=True).result() == "output"
    executor.execute_model(Step(), non_block=True)
    assert executor.sample_tokens(None, non_block=True).result() == "output"


def test_a_phase_without_a_step_is_refused() -> None:
    executor = Executor()
    executor.execute_model(Step())
    executor.sample_tokens(None)
    with pytest.raises(RuntimeError, match="must be called after execute_model"):
        executor.sample_tokens(None)


def test_the_bitmask_is_the_steps_own_or_refused() -> None:
    executor, step = Executor(), Step()
    step.grammar_bitmask = object()
    executor.execute_model(step)
    assert executor.sample_tokens(SimpleNamespace(grammar_bitmask=step.grammar_bitmask)) == "output"
    executor.execute_model(step)
    with pytest.raises(RuntimeError, match="another one cannot be applied"):
        executor.sample_tokens(SimpleNamespace(grammar_bitmask=object()))


def test_on_the_real_executor(apply_shim: ApplyShim) -> None:
    old_calls = apply_shim(PATCH)
    from vllm.v1.executor.abstract import Executor as Real
    from vllm.v1.executor.abstract import UniProcExecutor

    executor = UniProcExecutor.__new__(UniProcExecutor)
    executor.collective_rpc = lambda method, **kwargs: [method]
    assert isinstance(executor, Real)
    assert executor.execute_model(Step()) == "execute_model"
    assert old_calls() == 0
    assert executor.sample_tokens(None) == "execute_model"
    assert old_calls() == 1
