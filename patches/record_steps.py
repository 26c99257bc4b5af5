"""After each step of the model, the tapped rows are handed to the capture session with what the step says of them.

Why: only here is it known which request and position each row of the buffer is. What it does not change: what the
step computes and returns.
"""

from __future__ import annotations

from typing import Any

import wrapt

from vllm_overlay.capture.extension import CaptureExtension
from vllm_overlay.patch import Patch


def build(original: Any) -> Any:
    def step_and_record(wrapped: Any, worker: Any, args: Any, kwargs: Any) -> Any:
        scheduler_output = kwargs["scheduler_output"] if "scheduler_output" in kwargs else args[0]
        CaptureExtension.overlay_before_step(worker, scheduler_output)
        output = wrapped(*args, **kwargs)
        CaptureExtension.overlay_after_step(worker, scheduler_output)
        return output

    return wrapt.FunctionWrapper(original, step_and_record)


def verify() -> None:
    from vllm.v1.core.sched.output import SchedulerOutput

    used = ("scheduled_new_reqs", "scheduled_cached_reqs", "num_scheduled_tokens", "total_num_scheduled_tokens")
    missing = [name for name in used if name not in SchedulerOutput.__dataclass_fields__]
    if missing:
        raise RuntimeError(f"expected SchedulerOutput with {', '.join(missing)}")


PATCH = Patch(
    name="record_steps",
    targets=("{WORKER}:Worker.execute_model",),
    vllm=">=0.11",
    process="worker",
    relies_on={"{WORKER}:Worker.execute_model": ("scheduler_output",)},
    upstream="none",
    remove_when="vLLM captures any layer of any model, decode rows included, at serving speed",
    build=build,
    verify=verify,
    only_with_capture=True,
)
