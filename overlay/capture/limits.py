"""What capture refuses so far and the host memory it takes: facts that are told before anything is loaded.

Needs no torch.
"""

from __future__ import annotations

from collections.abc import Sequence

PARALLEL_SIZES = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")

# What a decoder layer may return.
CAPTURED_OUTPUT = "one tensor or (hidden, residual)"

# Host memory that rows may take before the step waits for the writer; at least two steps fit whatever their size.
HOST_BYTES = 1024 * 2**20


def describe_parallelism(name: str, size: int) -> str | None:
    """Why an engine with this size, one of PARALLEL_SIZES, is not captured; None if it is."""
    if size <= 1:
        return None
    return f"{name}={size}: capture runs on one rank so far; use 1, or unset VLLM_OVERLAY_CAPTURE"


def describe_runner(runner: str, captured: tuple[str, ...], vllm_version: str) -> str | None:
    """Why steps of this model runner (`V1` or `V2`) are not captured on a release that captures others; None if so."""
    if runner in captured:
        return None
    return (
        f"Model Runner {runner} of vLLM {vllm_version} is not captured, only {', '.join(captured)}: set "
        "VLLM_USE_V2_MODEL_RUNNER=0"
    )


def describe_first_layer(layer: str, parameters: Sequence[str]) -> str | None:
    """Why layer id 0, what the first layer receives, cannot be captured from such a forward; None if it can."""
    if "hidden_states" in parameters:
        return None
    return f"{layer}.forward takes ({', '.join(parameters)}); layer id 0 needs 'hidden_states'"


def describe_output(layer: str, count: int) -> str | None:
    """Why a layer that returns so many values (1: one tensor, not in a tuple) is not captured; None if it is."""
    if count in (1, 2):
        return None
    return f"{layer} returns a tuple of {count}; expected {CAPTURED_OUTPUT}"
