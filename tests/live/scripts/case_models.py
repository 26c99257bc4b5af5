"""Llamas that are fine as models and hard to capture."""

from __future__ import annotations

from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.model_executor.models.llama import LlamaDecoderLayer, LlamaForCausalLM


class OverwritingLayer(LlamaDecoderLayer):
    """Hands on the same memory at every call, and so does every other layer.

    `memory` is of a step's hidden states and residual, `[2, tokens, hidden]`.
    """

    memory: torch.Tensor

    def forward(
        self, positions: torch.Tensor, hidden_states: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        before = None if residual is None else residual.clone()
        hidden_states, after = super().forward(positions, hidden_states.clone(), before)
        count = len(hidden_states)
        self.memory[0, :count] = hidden_states
        self.memory[1, :count] = after
        return self.memory[0, :count], self.memory[1, :count]


class Overwriting(LlamaForCausalLM):
    """Whoever looks into its layers' outputs after a step finds a number that none of them had."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix, layer_type=OverwritingLayer)
        tokens = vllm_config.scheduler_config.max_num_batched_tokens
        # Not when this module is imported: a fork of a process whose OpenMP threads have run waits for them for ever.
        OverwritingLayer.memory = torch.zeros(2, tokens, vllm_config.model_config.get_hidden_size())

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, *rest: Any, **more: Any) -> Any:
        output = super().forward(input_ids, positions, *rest, **more).clone()
        OverwritingLayer.memory.fill_(7.0)
        return output


class UnhookedLayer(LlamaDecoderLayer):
    """Calls its forward past the hooks, as code does that was compiled before they were there."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)


class Unhooked(LlamaForCausalLM):
    """No tap of it fires."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix, layer_type=UnhookedLayer)


CASE_MODELS = (Overwriting, Unhooked)
