"""A finished request that `finish_requests` returns unpacks into its id and its client's number.

Why: `Scheduler.finish_requests` returned such pairs from 0.17 to 0.25 and returns the requests since 0.26.0. Through
0.16 it returned nothing, so that a caller of then looks at nothing and needs nothing. What it does not change: what is
returned, which newer callers read as requests, and who is finished.
"""

from __future__ import annotations

import inspect
from typing import Any

from vllm_overlay.activation import count_old_call
from vllm_overlay.patch import Patch, Restoration


def build(original: None = None) -> Any:
    # Unpacking reads 0, 1, ... until there is no more, and counts as one call.
    def get_item(request: Any, index: Any) -> Any:
        if index == 0:
            count_old_call(PATCH.name)
        return (request.request_id, request.client_index)[index]

    return get_item


def verify() -> None:
    from vllm.v1.request import Request

    if "client_index" not in inspect.signature(Request.__init__).parameters:
        raise RuntimeError("expected Request with client_index")


PATCH = Patch(
    name="unpack_finished_requests",
    targets=(),
    vllm=">=0.26",
    process="engine",
    relies_on={},
    upstream="none: vLLM promises nothing of its internals",
    remove_when="never: old programs stay as they are",
    build=build,
    verify=verify,
    restores=(Restoration("{REQUEST}:Request.__getitem__", build),),
    old_form="for request_id, client in scheduler.finish_requests(...) of 0.17 to 0.25",
)
