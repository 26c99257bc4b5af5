"""Where things live in vLLM from 0.32.0 on: what moved since 0.24.0."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm_overlay.compat.since_0_24_0 import (
    CAPTURED_RUNNERS,
    ENGINE_CORE,
    ENGINE_PROCESSES,
    ENVS,
    PARALLEL_CONFIG,
    SCHEDULER,
    VLLM_CONFIG,
    WORKER,
    external_request_id,
    full_attention_group,
    runner_style,
    step_order,
    step_token_ids,
)

__all__ = [
    "CAPTURED_RUNNERS",
    "ENGINE_CORE",
    "ENGINE_PROCESSES",
    "ENVS",
    "PARALLEL_CONFIG",
    "SCHEDULER",
    "SPECULATIVE_DECODING_ON_CPU",
    "VLLM_CONFIG",
    "WORKER",
    "block_copies",
    "external_request_id",
    "full_attention_group",
    "runner_style",
    "step_order",
    "step_token_ids",
]

SPECULATIVE_DECODING_ON_CPU = True


def block_copies(scheduler_output: Any) -> Sequence[tuple[int, int]]:
    """KV blocks (source, destination) that the worker copies before this step: a prefix hit ended inside a block."""
    return [(copy.src_block_id, copy.dst_block_id) for copy in scheduler_output.kv_cache_block_copies or ()]
