"""The store opens before the weights are read and the taps go in after: seen on a worker that loads nothing."""

from __future__ import annotations

from typing import Any

import pytest

from tests.patches.conftest import Apply
from vllm_overlay.activation import ActivationError
from vllm_overlay.capture.extension import CaptureExtension
from vllm_overlay.patches.tap_decoder_layers import PATCH, build


def test_open_load_tap(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(CaptureExtension, "overlay_open", lambda worker: calls.append("open"))
    monkeypatch.setattr(CaptureExtension, "overlay_tap", lambda worker: calls.append("tap"))

    class Worker:
        load_model = build(lambda self, **kwargs: calls.append(f"load {kwargs}"))

    worker: Any = Worker()
    worker.load_model(load_dummy_weights=False)
    assert calls == ["open", "load {'load_dummy_weights': False}", "tap"]


def test_a_worker_without_the_extension_is_refused_before_the_load(apply: Apply) -> None:
    from vllm.v1.worker.gpu_worker import Worker

    apply(PATCH)
    with pytest.raises(ActivationError, match=r"expected .*CaptureExtension among the bases of Worker, found none"):
        Worker.__new__(Worker).load_model()
