"""A plug-in of vLLM with three models that die as the story's did, each a Llama with one fault.

`register` is its entry point.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.model_executor.models import ModelRegistry
from vllm.model_executor.models.llama import LlamaDecoderLayer, LlamaForCausalLM


class Broken(LlamaForCausalLM):
    """Runs its layers itself, as a model does that was written for another release."""

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, *rest: Any, **more: Any) -> torch.Tensor:
        hidden_states, residual = self.embed(input_ids), None
        for layer in self.model.layers:
            hidden_states, residual = self.call(layer, positions, hidden_states, residual)
        normed, _ = self.model.norm(hidden_states, residual)
        return normed

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.model.embed_tokens(input_ids)

    def call(self, layer: Any, positions: Any, hidden_states: Any, residual: Any) -> Any:
        return layer(positions, hidden_states, residual)


class CallsByKeyword(Broken):
    """The layer takes `positions`."""

    def call(self, layer: Any, positions: Any, hidden_states: Any, residual: Any) -> Any:
        return layer(position_ids=positions, hidden_states=hidden_states, residual=residual)


class MissesMethod(Broken):
    """No release's inner model has this method."""

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.model.get_rows_of_tokens(input_ids)


class NeedyLayer(LlamaDecoderLayer):
    """Requires what the model's loop does not give."""

    def forward(self, positions: Any, hidden_states: Any, residual: Any, llama_4_scaling: Any) -> Any:
        return super().forward(positions, hidden_states, residual)


class MissesArgument(LlamaForCausalLM):
    """vLLM's own loop, and layers of another release."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix, layer_type=NeedyLayer)


def register() -> None:
    """Called in every process of vLLM."""
    for broken in (CallsByKeyword, MissesMethod, MissesArgument):
        ModelRegistry.register_model(broken.__name__, broken)
