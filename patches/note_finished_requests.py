"""The engine notes how long each request was when it finished, and why it finished.

Why: workers learn only the ids. With async scheduling a request that ends on a stop token has one more step in
flight, and its row is not the request's. What it does not change: what the scheduler frees or returns.
"""

from __future__ import annotations

from typing import Any

import wrapt

from vllm_overlay.capture.finished import note_finished
from vllm_overlay.patch import Patch


def build(original: Any) -> Any:
    def note(wrapped: Any, scheduler: Any, args: Any, kwargs: Any) -> Any:
        request = kwargs["request"] if "request" in kwargs else args[0]
        note_finished(scheduler, request)
        return wrapped(*args, **kwargs)

    return wrapt.FunctionWrapper(original, note)


def verify() -> None:
    from vllm.v1.request import Request

    missing = [name for name in ("request_id", "num_tokens", "get_finished_reason") if not _has(Request, name)]
    if missing:
        raise RuntimeError(f"expected vllm.v1.request.Request with {', '.join(missing)}")


def _has(cls: Any, name: str) -> bool:
    # request_id is set by __init__, so the class shows it only as the name of a parameter.
    return name in vars(cls) or name in cls.__init__.__code__.co_varnames


PATCH = Patch(
    name="note_finished_requests",
    targets=("{SCHEDULER}:Scheduler._free_request",),
    vllm=">=0.11",
    process="engine",
    relies_on={"{SCHEDULER}:Scheduler._free_request": ("request",)},
    upstream="none: SchedulerOutput.finished_req_ids carries ids only",
    remove_when="SchedulerOutput says how many tokens a finished request had",
    build=build,
    verify=verify,
    only_with_capture=True,
)
