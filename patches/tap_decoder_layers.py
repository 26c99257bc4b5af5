"""A worker's model gets its taps when it has been built, before it is profiled, compiled or graph-captured.

Why: this is the only moment at which the layers exist and no graph of them does. The store is opened before the
weights are read, so that a folder that cannot be written fails in a second and not after the load. What it does not
change: the model's weights, classes and forward code.
"""

from __future__ import annotations

from typing import Any

import wrapt

from vllm_overlay.capture.extension import CaptureExtension
from vllm_overlay.patch import Patch


def build(original: Any) -> Any:
    def load_and_tap(wrapped: Any, worker: Any, args: Any, kwargs: Any) -> Any:
        CaptureExtension.overlay_open(worker)
        result = wrapped(*args, **kwargs)
        CaptureExtension.overlay_tap(worker)
        return result

    return wrapt.FunctionWrapper(original, load_and_tap)


def verify() -> None:
    from vllm.v1.worker.gpu_worker import Worker

    if "get_model" not in vars(Worker):
        raise RuntimeError("expected Worker.get_model, found none")


PATCH = Patch(
    name="tap_decoder_layers",
    targets=("{WORKER}:Worker.load_model",),
    vllm=">=0.11",
    process="worker",
    relies_on={},
    upstream="none: vLLM's own extract_hidden_states needs a model that implements its EAGLE-3 interface",
    remove_when="vLLM captures any layer of any model, decode rows included, at serving speed",
    build=build,
    verify=verify,
    only_with_capture=True,
)
