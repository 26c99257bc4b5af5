"""What capture refuses so far and the host memory it takes: facts that are told before anything is loaded.

Needs no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

# Ranks that each compute some of a request's tokens. The second is an option from 0.12 on.
CONTEXT_PARALLEL_SIZES = ("decode_context_parallel_size", "prefill_context_parallel_size")

# What a decoder layer may return.
CAPTURED_OUTPUT = "one tensor, or hidden states and the residual"

# What a layer's forward calls the hidden states that it takes; the first that it has.
STREAM_NAMES = ("hidden_states", "hidden", "x", "inputs", "inputs_embeds")

# How a configuration says that its layers hand on several streams (hyper-connections, AltUp), or run in a loop.
STREAM_COUNTS = ("hc_mult", "hc_count", "altup_num_inputs")
PASS_COUNTS = ("loop_num", "total_ut_steps", "H_cycles")

# Host memory that rows may take before the step waits for the writer; at least two steps fit whatever their size.
HOST_BYTES = 1024 * 2**20


def describe_context_parallelism(name: str, size: int) -> str | None:
    """Why an engine with this size, one of CONTEXT_PARALLEL_SIZES, is not captured; None if it is."""
    if size <= 1:
        return None
    return f"{name}={size}: tokens spread over ranks are not joined; use 1, or unset VLLM_OVERLAY_CAPTURE"


def describe_sharded_stream(option: str | None) -> str | None:
    """Why an engine whose ranks hold parts of the residual stream, because of this option, is not captured."""
    if option is None:
        return None
    return (
        f"{option}: each tensor-parallel rank holds a part of the residual stream, and capture takes it whole from "
        "one; switch it off, or unset VLLM_OVERLAY_CAPTURE"
    )


def describe_runner(runner: str, captured: tuple[str, ...], vllm_version: str) -> str | None:
    """Why steps of this model runner (`V1` or `V2`) are not captured on a release that captures others; None if so."""
    if runner in captured:
        return None
    return (
        f"Model Runner {runner} of vLLM {vllm_version} is not captured, only {', '.join(captured)}: set "
        "VLLM_USE_V2_MODEL_RUNNER=0"
    )


def find_stream(parameters: Sequence[str]) -> str | None:
    """The parameter of a layer's forward that takes the hidden states; None if none is called so."""
    return next((name for name in STREAM_NAMES if name in parameters), None)


def describe_first_layer(layer: str, parameters: Sequence[str]) -> str | None:
    """Why layer id 0, what the first layer receives, cannot be captured from such a forward; None if it can."""
    if find_stream(parameters) is not None:
        return None
    return f"{layer}.forward takes ({', '.join(parameters)}); layer id 0 needs one of {', '.join(STREAM_NAMES)}"


def describe_output(layer: str, returned: Sequence[str], carries_residual: bool = True) -> str | None:
    """Why a layer that returns these names is not captured; None if it is.

    `carries_residual`: whether it takes the residual of the layer before it, and the stream is then two of the names.
    """
    if len(returned) <= 2 or not carries_residual or returned[1:].count("residual") == 1:
        return None
    return f"{layer} returns a tuple of {len(returned)}, ({', '.join(returned)}); expected {CAPTURED_OUTPUT}"


def describe_stream(layer: str, what: str, shape: Sequence[int] | None, hidden_size: int) -> str | None:
    """Why a value of this shape (None: no tensor) is not a residual stream; None if it is one.

    It is `[tokens, hidden]`, or `[1, tokens, hidden]` in transformers' own layers.
    """
    if shape is None:
        return f"{layer} hands on {what} that are no tensor; expected one of width {hidden_size}"
    if shape[-1] == hidden_size and (len(shape) == 2 or (len(shape) == 3 and shape[0] == 1)):
        return None
    return (
        f"{layer} hands on {what} of shape {list(shape)}, which is not one residual stream of width {hidden_size}: "
        "there is no state after a layer that could be captured"
    )


def describe_streams(config: Mapping[str, Any]) -> str | None:
    """Why the text model of this configuration has no single residual stream that passes each layer once."""
    if config.get("enable_ihc") is False or config.get("mhc") is False:
        config = {name: value for name, value in config.items() if name != "hc_mult"}
    for name in STREAM_COUNTS:
        if _is_above_one(config.get(name)):
            return (
                f"{name}={config[name]}: the layers hand on {config[name]} streams that are mixed anew at each layer, "
                "and no one residual stream; such a model is not captured"
            )
    for name in PASS_COUNTS:
        if _is_above_one(config.get(name)):
            return (
                f"{name}={config[name]}: the model runs its layers {config[name]} times for one token, and a layer id "
                "does not say which pass; such a model is not captured"
            )
    if config.get("bskcn_tv"):
        return (
            f"bskcn_tv={config['bskcn_tv']}: between some layers the stream is mixed with what earlier layers "
            "received, and what a layer hands on is not what the next one takes; such a model is not captured"
        )
    if config.get("attn_res_block_size") is not None:
        return (
            f"attn_res_block_size={config['attn_res_block_size']}: each layer's input is attended over the outputs of "
            "blocks before it, and is no running sum; such a model is not captured"
        )
    return None


def _is_above_one(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 1
