"""vLLM from 0.20.0 on: blocks are hashed in a size of their own. The rest as in 0.18.0."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm_overlay.compat.since_0_18_0 import *  # noqa: F403


def settle_block_sizes(kv_cache_config: Any, vllm_config: Any) -> Mapping[str, int]:
    """As vLLM resolves them, with the smallest block size of a group."""
    from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes

    sizes = [group.kv_cache_spec.block_size for group in kv_cache_config.kv_cache_groups]
    vllm_config.cache_config.block_size = min(sizes, default=vllm_config.cache_config.block_size)
    block_size, hash_block_size = resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
    return {"block_size": block_size, "hash_block_size": hash_block_size}
