"""speculators' cache configuration: no prefix cache, vLLM's own block size, and the rest as it was asked for."""

from __future__ import annotations

from typing import Any

from tests.patches.conftest import Apply
from tests.patches.old_consumer import import_old_consumer
from vllm_overlay.patches.configure_cache_as_0_11 import PATCH, build


def make(**kwargs: Any) -> dict[str, Any]:
    result: dict[str, Any] = build(dict)(**kwargs)
    return result


def test_what_is_asked_for() -> None:
    assert make(block_size=16, gpu_memory_utilization=0.8) == {
        "enable_prefix_caching": False,
        "gpu_memory_utilization": 0.8,
    }
    assert make(enable_prefix_caching=True) == {"enable_prefix_caching": True}


def test_the_generator_gets_it_and_vllm_does_not(apply: Apply) -> None:
    generator = import_old_consumer("vllm_hidden_states_generator")
    from vllm.config import CacheConfig

    stock = generator.CacheConfig(block_size=16)
    apply(PATCH)
    ours = generator.CacheConfig(block_size=16, gpu_memory_utilization=0.5)
    assert not ours.enable_prefix_caching
    assert ours.gpu_memory_utilization == 0.5
    assert ours.block_size == CacheConfig().block_size
    assert CacheConfig(block_size=16).block_size == stock.block_size == 16
