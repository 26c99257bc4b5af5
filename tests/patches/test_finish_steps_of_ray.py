"""Ray's executor, of which nothing runs here: that the patch fits, and what is done with an unfinished step."""

from __future__ import annotations

from typing import Any

from tests.patches.conftest import ApplyShim
from tests.patches.steps import Config, Scheduler, Step, TwoPhaseWorker
from vllm_overlay.old_programs import note_scheduler
from vllm_overlay.patches.finish_steps_of_ray import PATCH, build


class Executor(TwoPhaseWorker):
    vllm_config = Config()

    @build
    def execute_model(self, scheduler_output: Step, non_block: bool = False) -> Any:
        return self.answer("execute_model", scheduler_output)


def test_a_one_phase_program_gets_its_output() -> None:
    executor, step = Executor(), Step()
    assert executor.execute_model(step) is None
    scheduler = Scheduler(executor.vllm_config)
    note_scheduler(scheduler)
    assert executor.execute_model(step) == "output"
    assert executor.calls[-1] == ("sample_tokens", ("grammar", step))


def test_it_fits_this_vllm(apply_shim: ApplyShim) -> None:
    assert apply_shim(PATCH)() == 0
