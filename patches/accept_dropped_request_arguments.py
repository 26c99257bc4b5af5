"""A `Request` takes and honours `eos_token_id` and `structured_output_request`.

Why: 0.11.1 dropped the second and makes one from the sampling parameters, 0.17.0 dropped the first and reads it from
there too. A given token id ends the request as in 0.11: it goes into a copy of the sampling parameters, because two
requests may share them and differ in it. A given structured-output request is used as it is. What it does not change:
calls without the two, as vLLM's own are. Positional arguments are taken for old ones where types tell: no older form
is mistaken for a newer one, and what could be both is refused.
"""

from __future__ import annotations

import copy
import inspect
from typing import Any

import wrapt

from vllm_overlay.activation import count_old_call
from vllm_overlay.patch import Patch

FIRST = ("request_id", "prompt_token_ids", "sampling_params", "pooling_params")
# After them, in 0.11.0; later releases have no `structured_output_request`.
OLD_ORDER = (
    *("eos_token_id", "client_index", "arrival_time", "prompt_embeds", "mm_features", "lora_request"),
    *("structured_output_request", "cache_salt", "priority", "trace_headers", "block_hasher"),
)
DROPPED = ("eos_token_id", "structured_output_request")
PLACE = OLD_ORDER.index("structured_output_request")


def build(original: Any) -> Any:
    parameters = tuple(inspect.signature(original).parameters)[1:]
    dropped = [name for name in DROPPED if name not in parameters]

    def accept(wrapped: Any, request: Any, args: Any, kwargs: Any) -> None:
        named = name_positional(args, kwargs, parameters) | kwargs
        given = {name: named.pop(name) for name in dropped if name in named}
        if not given:
            wrapped(*args, **kwargs)
            return
        sampling_params = named.get("sampling_params")
        if "eos_token_id" in given and sampling_params is not None:
            named["sampling_params"] = end_on(sampling_params, given["eos_token_id"])
        wrapped(**named)
        if given.get("structured_output_request") is not None:
            use_structured_output(request, given["structured_output_request"])
        count_old_call(PATCH.name)

    return wrapt.FunctionWrapper(original, accept)


def name_positional(args: tuple[Any, ...], kwargs: dict[str, Any], parameters: tuple[str, ...]) -> dict[str, Any]:
    """Positional arguments by name, in the order of the release that the call was written for."""
    rest = args[len(FIRST) :]
    names = parameters
    if rest and is_old(rest, kwargs, "eos_token_id" in parameters):
        later = [name for name in OLD_ORDER if name != "structured_output_request" or has_structured_output(rest)]
        names = (*FIRST, *later)
    if len(args) > len(names) or set(names[: len(args)]) & kwargs.keys():
        raise TypeError(f"Request takes ({', '.join(names)}): got more than that or one of them twice")
    return dict(zip(names, args, strict=False))


def is_old(rest: tuple[Any, ...], kwargs: dict[str, Any], takes_eos: bool) -> bool:
    """Whether the fifth argument is a token id. From 0.17.0 on it is the client's number, and the sixth a time."""
    if takes_eos:
        return has_structured_output(rest)
    if rest[0] is None or "client_index" in kwargs:
        return True
    if len(rest) > 1:
        return isinstance(rest[1], int)
    raise TypeError(
        "Request: the fifth positional argument is eos_token_id for a program written before vLLM 0.17 and "
        f"client_index for a later one, and {rest[0]!r} may be either: name it"
    )


def has_structured_output(rest: tuple[Any, ...]) -> bool:
    """Whether the order is that of 0.11.0: what follows is a salt, a text or None, and a priority in later ones."""
    from vllm.v1.structured_output.request import StructuredOutputRequest

    if len(rest) <= PLACE or isinstance(rest[PLACE], StructuredOutputRequest):
        return len(rest) > PLACE
    return rest[PLACE] is None and len(rest) > PLACE + 1 and not isinstance(rest[PLACE + 1], int)


def end_on(sampling_params: Any, eos_token_id: int | None) -> Any:
    """These sampling parameters with this token to end on, or none if they ignore it, as 0.11 looked at both."""
    wanted = None if sampling_params.ignore_eos else eos_token_id
    if sampling_params.eos_token_id == wanted:
        return sampling_params
    ours = copy.copy(sampling_params)
    ours._eos_token_id = wanted
    return ours


def use_structured_output(request: Any, given: Any) -> None:
    if given.params is None or given.params.all_constraints_none():
        return
    if request.structured_output_request is None:
        raise ValueError(
            f"Request {request.request_id!r}: structured_output_request has constraints, and sampling_params has no "
            "structured_outputs, by which the engine compiles them"
        )
    request.structured_output_request = given


def verify() -> None:
    from vllm.v1.structured_output.request import StructuredOutputRequest

    if "reasoning_ended" not in StructuredOutputRequest.__dataclass_fields__:
        raise RuntimeError("expected StructuredOutputRequest.reasoning_ended, found no such field")


PATCH = Patch(
    name="accept_dropped_request_arguments",
    targets=("{REQUEST}:Request.__init__",),
    vllm=">=0.11.1",
    process="engine",
    relies_on={"{REQUEST}:Request.__init__": (*FIRST, "client_index", "arrival_time")},
    upstream="none: vLLM promises nothing of its internals",
    remove_when="never: old programs stay as they are",
    build=build,
    verify=verify,
    old_form="Request(..., eos_token_id, structured_output_request=...) of 0.11 to 0.16",
)
