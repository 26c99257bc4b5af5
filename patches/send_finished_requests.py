"""The ids of finished requests reach the workers together with what `note_finished_requests` noted.

Why: the worker writes a request's record when it hears that the request finished, and must know its length. What it
does not change: `finished_req_ids` stays a set of ids; ours is a subclass that holds the facts beside them.
"""

from __future__ import annotations

from typing import Any

import wrapt

from vllm_overlay.activation import note_role
from vllm_overlay.capture.finished import FinishedRequests, take_finished
from vllm_overlay.patch import Patch


def build(original: Any) -> Any:
    def send(wrapped: Any, scheduler: Any, args: Any, kwargs: Any) -> Any:
        note_role("engine")
        output = wrapped(*args, **kwargs)
        output.finished_req_ids = FinishedRequests(output.finished_req_ids, take_finished(scheduler))
        return output

    return wrapt.FunctionWrapper(original, send)


def verify() -> None:
    from vllm.v1.core.sched.output import SchedulerOutput

    if "finished_req_ids" not in SchedulerOutput.__dataclass_fields__:
        raise RuntimeError("expected SchedulerOutput.finished_req_ids, found no such field")


PATCH = Patch(
    name="send_finished_requests",
    targets=("{SCHEDULER}:Scheduler.schedule",),
    vllm=">=0.11",
    process="engine",
    relies_on={},
    upstream="none: SchedulerOutput.finished_req_ids carries ids only",
    remove_when="SchedulerOutput says how many tokens a finished request had",
    build=build,
    verify=verify,
    only_with_capture=True,
)
