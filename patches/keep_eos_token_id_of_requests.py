"""`Request.eos_token_id` can be read, as through 0.17.

Why: since then it is in the request's sampling parameters only. What it does not change: where the engine reads it.
"""

from __future__ import annotations

from typing import Any

from vllm_overlay.activation import count_old_call
from vllm_overlay.patch import Patch, Restoration


def build(original: None = None) -> Any:
    def eos_token_id(request: Any) -> int | None:
        count_old_call(PATCH.name)
        parameters = request.sampling_params
        return None if parameters is None else parameters.eos_token_id

    return property(eos_token_id)


def verify() -> None:
    from vllm.sampling_params import SamplingParams

    if "eos_token_id" not in vars(SamplingParams):
        raise RuntimeError("expected SamplingParams.eos_token_id, found none")


PATCH = Patch(
    name="keep_eos_token_id_of_requests",
    targets=(),
    vllm=">=0.18",
    process="engine",
    relies_on={},
    upstream="none: vLLM promises nothing of its internals",
    remove_when="never: old programs stay as they are",
    build=build,
    verify=verify,
    restores=(Restoration("{REQUEST}:Request.eos_token_id", build),),
    old_form="request.eos_token_id of 0.11 to 0.17",
)
