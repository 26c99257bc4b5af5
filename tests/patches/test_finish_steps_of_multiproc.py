"""On vLLM's executor with workers in processes of their own, whose answers are made up here."""

from __future__ import annotations

from typing import Any

import pytest

from tests.patches.conftest import ApplyShim
from tests.patches.steps import Config, Scheduler, Step, TwoPhaseWorker
from vllm_overlay.old_programs import note_scheduler
from vllm_overlay.patches.finish_steps_of_multiproc import PATCH


@pytest.fixture
def old_calls(apply_shim: ApplyShim) -> Any:
    return apply_shim(PATCH)


@pytest.fixture
def executor(old_calls: Any) -> Any:
    from concurrent.futures import Future

    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    class Executor(MultiprocExecutor):  # type: ignore[misc]
        output_rank = 0
        kv_output_aggregator = ec_output_aggregator = None

        def __init__(self) -> None:
            self.vllm_config = Config()
            self.worker = TwoPhaseWorker()

        def collective_rpc(self, method: str, args: Any = (), non_block: bool = False, **_: Any) -> Any:
            if not non_block:
                return self.worker.answer(method, *args)
            done: Future[Any] = Future()
            try:
                done.set_result(self.worker.answer(method, *args))
            except ValueError as error:
                done.set_exception(error)
            return done

    return Executor()


def test_a_one_phase_program_gets_its_output(old_calls: Any, executor: Any) -> None:
    scheduler, step = Scheduler(executor.vllm_config), Step()
    note_scheduler(scheduler)
    assert executor.execute_model(step) == "output"
    assert executor.worker.calls == [("execute_model", step), ("sample_tokens", ("grammar", step))]
    assert old_calls() == 1


def test_everybody_else_goes_straight_through(old_calls: Any, executor: Any) -> None:
    assert executor.execute_model(Step()) is None
    assert executor.sample_tokens("its own") == "output"
    assert executor.execute_model(Step(), non_block=True).result() is None
    assert old_calls() == 0


def test_a_future_is_one_of_the_finished_step(old_calls: Any, executor: Any) -> None:
    scheduler, step = Scheduler(executor.vllm_config), Step()
    note_scheduler(scheduler)
    assert executor.execute_model(step, non_block=True).result() == "output"
    assert old_calls() == 1


def test_what_went_wrong_in_the_first_phase_reaches_who_waits(executor: Any) -> None:
    """The second phase, which finds nothing to sample, would say nothing of it."""
    scheduler, step = Scheduler(executor.vllm_config), Step()
    note_scheduler(scheduler)
    executor.worker.failure = ValueError("no such token")
    future = executor.execute_model(step, non_block=True)
    assert future.done()
    with pytest.raises(ValueError, match="no such token"):
        future.result()
