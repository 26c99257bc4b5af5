"""On vLLM's executor with a worker in its process: who gets a finished step, and who asks for it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.patches.conftest import ApplyShim
from tests.patches.steps import Config, Scheduler, Step, TwoPhaseWorker
from vllm_overlay.old_programs import note_scheduler
from vllm_overlay.patches.finish_steps_of_uniproc import PATCH


@pytest.fixture
def old_calls(apply_shim: ApplyShim) -> Any:
    return apply_shim(PATCH)


@pytest.fixture
def executor(old_calls: Any) -> Any:
    from vllm.v1.executor.uniproc_executor import UniProcExecutor

    executor = UniProcExecutor.__new__(UniProcExecutor)
    executor.vllm_config = Config()
    executor.driver_worker = TwoPhaseWorker()
    return executor


@pytest.mark.parametrize("by_keyword", [False, True])
def test_a_one_phase_program_gets_its_output(old_calls: Any, executor: Any, by_keyword: bool) -> None:
    scheduler, step = Scheduler(executor.vllm_config), Step()
    note_scheduler(scheduler)
    output = executor.execute_model(scheduler_output=step) if by_keyword else executor.execute_model(step)
    assert output == "output"
    assert executor.driver_worker.calls == [("execute_model", step), ("sample_tokens", ("grammar", step))]
    assert old_calls() == 1


def test_a_step_without_tokens_is_finished_already(old_calls: Any, executor: Any) -> None:
    scheduler, step = Scheduler(executor.vllm_config), Step()
    note_scheduler(scheduler)
    step.total_num_scheduled_tokens = 0
    assert executor.execute_model(step) == "nothing to do"
    assert old_calls() == 0


def test_an_output_on_its_way_is_waited_for(executor: Any) -> None:
    from vllm.v1.outputs import AsyncModelRunnerOutput

    class OnItsWay(AsyncModelRunnerOutput):
        def get_output(self) -> Any:
            return "arrived"

    scheduler = Scheduler(executor.vllm_config)
    note_scheduler(scheduler)
    executor.driver_worker.output = OnItsWay()
    assert executor.execute_model(Step()) == "arrived"


def test_a_two_phase_program_asks_itself(old_calls: Any, executor: Any) -> None:
    step = Step()
    assert executor.execute_model(step) is None
    assert executor.sample_tokens("its own") == "output"
    assert executor.driver_worker.calls == [("execute_model", step), ("sample_tokens", "its own")]
    assert old_calls() == 0


def test_the_engines_calls_go_straight_through(old_calls: Any, executor: Any) -> None:
    assert executor.execute_model(Step(), non_block=True).result() is None
    assert len(executor.driver_worker.calls) == 1
    assert old_calls() == 0


def test_a_future_is_one_of_the_finished_step(old_calls: Any, executor: Any) -> None:
    scheduler, step = Scheduler(executor.vllm_config), Step()
    note_scheduler(scheduler)
    future = executor.execute_model(step, non_block=True)
    assert future.done()
    assert future.result() == "output"
    assert old_calls() == 1
    step.total_num_scheduled_tokens = 0
    assert executor.execute_model(step, non_block=True).result() == "nothing to do"
    assert old_calls() == 1


def test_what_went_wrong_in_the_first_phase_reaches_who_waits(executor: Any) -> None:
    scheduler, step = Scheduler(executor.vllm_config), Step()
    note_scheduler(scheduler)
    executor.driver_worker.failure = ValueError("no such token")
    with pytest.raises(ValueError, match="no such token"):
        executor.execute_model(step, non_block=True).result()
    with pytest.raises(ValueError, match="no such token"):
        executor.execute_model(step)


def test_a_pooling_step_has_no_second_phase(old_calls: Any, executor: Any) -> None:
    executor.vllm_config = Config("pooling")
    scheduler = Scheduler(executor.vllm_config)
    note_scheduler(scheduler)
    executor.execute_model(Step(), non_block=True)
    assert len(executor.driver_worker.calls) == 1
    assert old_calls() == 0


def test_a_scheduler_that_is_gone_or_anothers_counts_for_nothing(executor: Any) -> None:
    other = Scheduler(Config())
    note_scheduler(other)
    note_scheduler(Scheduler(executor.vllm_config))
    assert executor.execute_model(Step()) is None
