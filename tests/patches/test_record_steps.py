"""A step is prepared before it runs and recorded after, whatever way its argument is passed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.patches.conftest import Apply
from vllm_overlay.capture.extension import CaptureExtension
from vllm_overlay.patches.record_steps import PATCH, build


@pytest.mark.parametrize("by_keyword", [False, True])
def test_before_and_after(monkeypatch: pytest.MonkeyPatch, by_keyword: bool) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(CaptureExtension, "overlay_before_step", lambda worker, step: calls.append(("before", step)))
    monkeypatch.setattr(CaptureExtension, "overlay_after_step", lambda worker, step: calls.append(("after", step)))

    class Worker:
        @build
        def execute_model(self, scheduler_output: str) -> str:
            calls.append(("run", scheduler_output))
            return "output"

    worker = Worker()
    assert (worker.execute_model(scheduler_output="s") if by_keyword else worker.execute_model("s")) == "output"
    assert calls == [("before", "s"), ("run", "s"), ("after", "s")]


def test_it_fits_this_vllm(apply: Apply) -> None:
    from vllm.v1.worker.gpu_worker import Worker

    original = vars(Worker)["execute_model"]
    applied = apply(PATCH)
    assert applied.replacements[0].original is original
    assert Worker.execute_model.__wrapped__ is not None


def test_a_dummy_batch_is_no_step(apply: Apply, monkeypatch: pytest.MonkeyPatch) -> None:
    """A data-parallel replica without requests runs the model for the others: below the worker's `execute_model`."""
    from vllm.v1.worker.gpu_worker import Worker

    calls: list[str] = []
    monkeypatch.setattr(CaptureExtension, "overlay_before_step", lambda worker, step: calls.append("recorded"))
    # From 0.31 on a property that reads the parallel configuration.
    monkeypatch.setattr(Worker, "randomize_dummy_inputs", False, raising=False)
    apply(PATCH)
    worker: Any = Worker.__new__(Worker)
    worker.use_v2_model_runner = False
    worker.model_runner = SimpleNamespace(
        uniform_decode_query_len=1, _dummy_run=lambda *arguments, **options: calls.append("dummy run")
    )
    worker.execute_dummy_batch()
    assert calls == ["dummy run"]
