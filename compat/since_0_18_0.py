"""vLLM from 0.18.0 on: block size of the smallest KV-cache group; EAGLE-3 getter renamed. The rest as in 0.17.0."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vllm_overlay.compat import since_0_17_0
from vllm_overlay.compat.since_0_17_0 import *  # noqa: F403

RENAMED_MODEL_METHODS: Mapping[str, str] = {
    "get_input_embeddings": "embed_input_ids",
    "get_multimodal_embeddings": "embed_multimodal",
    "get_eagle3_aux_hidden_state_layers": "get_eagle3_default_aux_hidden_state_layers",
}


def settle_block_sizes(kv_cache_config: Any, vllm_config: Any) -> Mapping[str, int]:
    """As in 0.12.0, with the smallest block size of a group."""
    sizes = [group.kv_cache_spec.block_size for group in kv_cache_config.kv_cache_groups]
    vllm_config.cache_config.block_size = min(sizes, default=vllm_config.cache_config.block_size)
    return since_0_17_0.settle_block_sizes(kv_cache_config, vllm_config)


def fed_layer_ids(asked: Sequence[int], num_hidden_layers: int) -> tuple[int, ...]:
    """As in 0.11.1, with ids 0 and N."""
    if not asked:
        return since_0_17_0.fed_layer_ids(asked, num_hidden_layers)
    return tuple(sorted({layer_id for layer_id in asked if 0 <= layer_id <= num_hidden_layers}))
