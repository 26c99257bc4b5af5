"""vLLM from 0.29.0 on: one layout of KV caches for all workers; the launcher has moved. The rest as in 0.26.0."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from vllm_overlay.compat.since_0_26_0 import *  # noqa: F403

LAUNCHER = "vllm.entrypoints.launchers.launcher"


def settle_kv_cache_layout(vllm_config: Any, executor: Any, kv_cache_specs: Iterable[Any]) -> bool:
    """Settle the layout that all workers support, here and in each of them, if it is not settled."""
    from vllm.v1.attention.backends.utils import resolve_kv_cache_layout

    if vllm_config.cache_config.kv_cache_layout is not None or executor is None:
        return False
    layout = resolve_kv_cache_layout(vllm_config, executor.get_supported_kv_cache_layouts(), kv_cache_specs)
    executor.set_kv_cache_layout(layout.name)
    return True
