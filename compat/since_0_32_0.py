"""vLLM from 0.32.0 on: the CPU decodes speculatively, and workers are told of block hashes. The rest as in 0.30.0."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm_overlay.compat import since_0_30_0
from vllm_overlay.compat.since_0_30_0 import *  # noqa: F403

SPECULATIVE_DECODING_ON_CPU = True


def sharding_option(vllm_config: Any) -> str | None:
    """As in 0.25.0; the compilation pass is gone."""
    shards = vllm_config.parallel_config.use_sequence_parallel_moe
    return "enable_expert_parallel with both tensor and data parallelism" if shards else None


def settle_block_sizes(kv_cache_config: Any, vllm_config: Any) -> Mapping[str, int]:
    """As in 0.30.0, and noted in `kv_cache_config` for the workers."""
    from vllm.v1.core.kv_cache_utils import resolve_cache_hit_alignment_tokens

    sizes = since_0_30_0.settle_block_sizes(kv_cache_config, vllm_config)
    kv_cache_config.hash_block_size = sizes["hash_block_size"]
    kv_cache_config.cache_hit_alignment_tokens = resolve_cache_hit_alignment_tokens(
        kv_cache_config, vllm_config, sizes["block_size"], sizes["hash_block_size"]
    )
    return sizes
