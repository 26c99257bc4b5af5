"""vLLM from 0.11.1 on: two phases, and a configuration module of its own. The rest as in 0.11.0."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from vllm_overlay.compat import since_0_11_0
from vllm_overlay.compat.since_0_11_0 import *  # noqa: F403

RAY_EXECUTOR = "vllm.v1.executor.ray_executor"
UNIPROC_EXECUTOR = "vllm.v1.executor.uniproc_executor"
VLLM_CONFIG = "vllm.config.vllm"

RENAMED_MODEL_METHODS: Mapping[str, str] = {
    "get_input_embeddings": "embed_input_ids",
    "get_multimodal_embeddings": "embed_multimodal",
    "get_eagle3_default_aux_hidden_state_layers": "get_eagle3_aux_hidden_state_layers",
}


def resumed_requests(cached_requests: Any) -> Collection[str]:
    """The engine's ids of the requests that come back after a pre-emption."""
    resumed: set[str] = cached_requests.resumed_req_ids
    return resumed


def fed_layer_ids(asked: Sequence[int], num_hidden_layers: int) -> tuple[int, ...]:
    """What the draft's config.json asks for, or else as in 0.11.0. Models take them in passing, in ascending order, at
    the layer that reads them: there is no residual yet at id 0, and no layer reads id N."""
    if not asked:
        return since_0_11_0.fed_layer_ids(asked, num_hidden_layers)
    return tuple(sorted({layer_id for layer_id in asked if 0 < layer_id < num_hidden_layers}))
