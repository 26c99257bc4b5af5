"""vLLM from 0.33.0 on: KV caches are planned in a module of their own. The rest as in 0.32.0."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from vllm_overlay.compat.since_0_32_0 import *  # noqa: F403

KV_CACHE_PLANNING = "vllm.v1.core.kv_cache_planning"


def settle_kv_cache_layout(vllm_config: Any, executor: Any, kv_cache_specs: Iterable[Any]) -> bool:
    """As in 0.29.0; workers are told too how context parallelism interleaves."""
    from vllm.v1.attention.backends.utils import resolve_kv_cache_layout

    if vllm_config.cache_config.kv_cache_layout is not None or executor is None:
        return False
    layout = resolve_kv_cache_layout(vllm_config, executor.get_supported_kv_cache_layouts(), kv_cache_specs)
    executor.set_kv_cache_layout(layout.name, vllm_config.parallel_config.cp_kv_cache_interleave_size)
    return True
