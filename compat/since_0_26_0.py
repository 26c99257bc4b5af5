"""vLLM from 0.26.0 on: KV blocks are copied before a step whose prefix hit ended inside one. The rest as in 0.25.0."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm_overlay.compat.since_0_25_0 import *  # noqa: F403


def block_copies(scheduler_output: Any) -> Sequence[tuple[int, int]]:
    """KV blocks (source, destination) that the worker copies before this step."""
    return [(copy.src_block_id, copy.dst_block_id) for copy in scheduler_output.kv_cache_block_copies or ()]
