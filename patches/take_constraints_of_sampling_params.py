"""A `StructuredOutputRequest` is made of sampling parameters, as in 0.11.0, as well as of their constraints.

Why: 0.11.1 takes `params`, the constraints alone, where 0.11.0 took `sampling_params`. What it does not change: calls
with constraints, as vLLM's own are.
"""

from __future__ import annotations

from typing import Any

import wrapt

from vllm_overlay.activation import count_old_call
from vllm_overlay.patch import Patch


def build(original: Any) -> Any:
    def take(wrapped: Any, request: Any, args: Any, kwargs: Any) -> None:
        given = args[0] if args else kwargs.get("sampling_params")
        if not is_sampling_params(given):
            wrapped(*args, **kwargs)
            return
        others = {name: value for name, value in kwargs.items() if name != "sampling_params"}
        wrapped(given.structured_outputs, *args[1:], **others)
        count_old_call(PATCH.name)

    return wrapt.FunctionWrapper(original, take)


def is_sampling_params(given: Any) -> bool:
    from vllm.sampling_params import SamplingParams

    return isinstance(given, SamplingParams)


def verify() -> None:
    from vllm.sampling_params import SamplingParams

    if "structured_outputs" not in SamplingParams.__struct_fields__:
        raise RuntimeError("expected SamplingParams.structured_outputs, found no such field")


PATCH = Patch(
    name="take_constraints_of_sampling_params",
    targets=("{STRUCTURED_OUTPUT_REQUEST}:StructuredOutputRequest.__init__",),
    vllm=">=0.11.1",
    process="engine",
    relies_on={"{STRUCTURED_OUTPUT_REQUEST}:StructuredOutputRequest.__init__": ("params",)},
    upstream="none: vLLM promises nothing of its internals",
    remove_when="never: old programs stay as they are",
    build=build,
    verify=verify,
    old_form="StructuredOutputRequest(sampling_params=...) of 0.11.0",
)
