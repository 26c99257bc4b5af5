"""Nothing is recorded while a worker warms up, and everything again afterwards, also when the warm-up fails."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.patches.conftest import Apply
from vllm_overlay.capture.extension import CaptureExtension
from vllm_overlay.patches.leave_out_warm_up_steps import PATCH, build


class Session:
    def __init__(self) -> None:
        self.steps: list[str] = []
        self.heard: list[str] = []

    def prepare_step(self, step: str) -> None:
        pass

    def hear_of_ended(self, step: str) -> None:
        self.heard.append(step)

    def record_step(self, worker: Any, step: str) -> None:
        self.steps.append(step)


class Worker(CaptureExtension):
    model_runner = SimpleNamespace()

    @build
    def compile_or_warm_up_model(self, fail: bool = False) -> None:
        self.overlay_before_step("invented")
        self.overlay_after_step("invented")
        if fail:
            raise RuntimeError("out of memory")


@pytest.mark.parametrize("fail", [False, True])
def test_only_real_steps_are_recorded(fail: bool) -> None:
    worker = Worker()
    session: Any = Session()
    worker.overlay_session = session
    if fail:
        with pytest.raises(RuntimeError, match="out of memory"):
            worker.compile_or_warm_up_model(fail=True)
    else:
        worker.compile_or_warm_up_model()
    worker.overlay_before_step("real")
    assert session.heard == ["real"], "before the step, which may fail"
    worker.overlay_after_step("real")
    assert session.steps == ["real"]


def test_it_fits_this_vllm(apply: Apply) -> None:
    assert apply(PATCH).replacements[0].is_in_place()
