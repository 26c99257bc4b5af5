"""vLLM from 0.30.0 on: KV-cache groups may keep no prefixes, and the CPU does not decode speculatively. The rest as in
0.29.0."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm_overlay.compat.since_0_29_0 import *  # noqa: F403

# 0.31.0 does again; the two have one seam.
SPECULATIVE_DECODING_ON_CPU = False


def settle_block_sizes(kv_cache_config: Any, vllm_config: Any) -> Mapping[str, int]:
    """As vLLM resolves them, with the smallest block size of a group that keeps prefixes, if one does."""
    from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes

    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    sizes = [spec.block_size for spec in [one for one in specs if one.prefix_cacheable] or specs]
    vllm_config.cache_config.block_size = min(sizes, default=vllm_config.cache_config.block_size)
    block_size, hash_block_size = resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
    return {"block_size": block_size, "hash_block_size": hash_block_size}
