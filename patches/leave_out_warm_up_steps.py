"""Steps that vLLM makes up to warm its kernels are not captured.

Why: with Model Runner V2 a worker warms up by running invented requests through its own `execute_model`; they come
from no scheduler and belong to nobody. What it does not change: the warm-up itself, which runs the tapped model.
"""

from __future__ import annotations

from typing import Any

import wrapt

from vllm_overlay.capture.extension import CaptureExtension
from vllm_overlay.patch import Patch


def build(original: Any) -> Any:
    def warm_up_unrecorded(wrapped: Any, worker: Any, args: Any, kwargs: Any) -> Any:
        with CaptureExtension.overlay_paused(worker):
            return wrapped(*args, **kwargs)

    return wrapt.FunctionWrapper(original, warm_up_unrecorded)


def verify() -> None:
    from vllm.v1.worker.gpu_worker import Worker

    if "execute_model" not in vars(Worker):
        raise RuntimeError("expected Worker.execute_model beside the warm-up, found none")


PATCH = Patch(
    name="leave_out_warm_up_steps",
    targets=("{WORKER}:Worker.compile_or_warm_up_model",),
    # Before, warm-up runs the model below `execute_model` only.
    vllm=">=0.24",
    process="worker",
    relies_on={},
    upstream="none: warm-up requests carry no mark",
    remove_when="vLLM marks the steps of its warm-up",
    build=build,
    verify=verify,
    only_with_capture=True,
)
