"""The EAGLE-3 draft: three features fused by `fc`, one Llama or Qwen3 layer over (embedding, feature), a small head.

Parameter names are those of the checkpoint that vLLM loads, so that export is a plain save. Sources: EAGLE-3 (Li et
al. 2025); `vllm/model_executor/models/llama_eagle3.py`, whose forward this follows line by line, and `qwen3_eagle3.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import nn
from torch.nn.functional import embedding, silu

from vllm_overlay.eagle3.attention import Sight, attend, rotate
from vllm_overlay.eagle3.target import rms_norm, widen

NUM_FEATURES = 3


@dataclass(frozen=True)
class DraftConfig:
    """The shapes of a draft. One whose `hidden_size` differs from the target's carries embeddings of its own."""

    hidden_size: int
    target_hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    draft_vocab_size: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    norm_before_residual: bool
    layer_ids: tuple[int, ...]  # residual-stream ids of the three features: id k is the stream after k decoder layers
    norm_before_fc: bool = False  # one norm over the three features together (vLLM 0.18 on)
    fc_norm: bool = False  # a norm for each feature (vLLM 0.22 on)
    norm_output: bool = False  # later steps read the layer's output after `norm` (vLLM 0.22 on; ignored before)
    style: str = "llama"  # or "qwen3": each head's queries and keys are normed before they are rotated (vLLM 0.24 on)

    @property
    def has_own_embeddings(self) -> bool:
        """vLLM shares the target's embeddings with a draft that has none, which only fits where the sizes are equal."""
        return self.hidden_size != self.target_hidden_size


@dataclass
class Chain:
    """What a step leaves for the next: keys and values of step 0 for all tokens, then a pair of each later step."""

    keys: torch.Tensor  # [tokens, kv_heads, head_dim]
    values: torch.Tensor
    rows: torch.Tensor  # int64 [rows]: token number in the batch of each row that predicts
    sight: Sight
    tail_keys: list[torch.Tensor] = field(default_factory=list)  # each [rows, kv_heads, head_dim]
    tail_values: list[torch.Tensor] = field(default_factory=list)


class RMSNorm(nn.Module):
    """Llama's RMSNorm with its weight, computed in float32 and given in the input's dtype."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(widen(x), self.weight, self.eps).to(x.dtype)


class Attention(nn.Module):
    """The projections of the layer's attention; their input is twice as wide as Llama's or Qwen3's.

    Source of the norms: `vllm/model_executor/models/qwen3.py`, `Qwen3Attention`.
    """

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.theta = config.rope_theta
        self.query_shape = (config.num_attention_heads, config.head_dim)
        self.kv_shape = (config.num_key_value_heads, config.head_dim)
        query_size, kv_size = math.prod(self.query_shape), math.prod(self.kv_shape)
        self.q_proj = nn.Linear(2 * config.hidden_size, query_size, bias=False)
        self.k_proj = nn.Linear(2 * config.hidden_size, kv_size, bias=False)
        self.v_proj = nn.Linear(2 * config.hidden_size, kv_size, bias=False)
        self.o_proj = nn.Linear(query_size, config.hidden_size, bias=False)
        has_norms = config.style == "qwen3"
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if has_norms else nn.Identity()
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if has_norms else nn.Identity()

    def queries(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return rotate(self.q_norm(self.q_proj(x).view(len(x), *self.query_shape)), positions, self.theta)

    def keys_and_values(self, x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        keys = rotate(self.k_norm(self.k_proj(x).view(len(x), *self.kv_shape)), positions, self.theta)
        return keys, self.v_proj(x).view(len(x), *self.kv_shape)


class MLP(nn.Module):
    """Llama's gated MLP."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return cast(torch.Tensor, self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x)))


class Midlayer(nn.Module):
    """The one decoder layer, over cat(input_layernorm(embedding), hidden_norm(feature))."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.norm_before_residual = config.norm_before_residual
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def enter(self, embeddings: torch.Tensor, features: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Both inputs [n, hidden] -> the attention's input [n, 2 * hidden] and the residual [n, hidden]."""
        normed = self.hidden_norm(features)
        residual = normed if self.norm_before_residual else features
        return torch.cat([self.input_layernorm(embeddings), normed], dim=-1), residual

    def leave(self, attended: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Attention output [rows, heads * head_dim], residual [rows, hidden] -> layer output [rows, hidden]."""
        residual = residual + self.self_attn.o_proj(attended)
        return residual + cast(torch.Tensor, self.mlp(self.post_attention_layernorm(residual)))


class Draft(nn.Module):
    """The draft. `target_embeddings`: [vocab, hidden], frozen and shared; None where the draft has its own."""

    def __init__(self, config: DraftConfig, target_embeddings: torch.Tensor | None) -> None:
        super().__init__()
        self.config = config
        size = config.target_hidden_size
        if config.norm_before_fc:
            self.input_norm = RMSNorm(NUM_FEATURES * size, config.rms_norm_eps)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(RMSNorm(size, config.rms_norm_eps) for _ in range(NUM_FEATURES))
        self.fc = nn.Linear(NUM_FEATURES * size, config.hidden_size, bias=False)
        self.midlayer = Midlayer(config)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        if config.has_own_embeddings:
            self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        else:
            # Not persistent: the file must not hold the target's embeddings, vLLM shares them.
            self.register_buffer("target_embeddings", target_embeddings, persistent=False)

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """int64 [n] -> [n, hidden]."""
        if self.config.has_own_embeddings:
            return cast(torch.Tensor, self.embed_tokens(token_ids))
        return widen(embedding(token_ids, cast(torch.Tensor, self.target_embeddings)))

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        """[tokens, 3, target_hidden], of 16 bits or more -> [tokens, hidden]."""
        features = widen(features)
        if self.config.norm_before_fc:
            features = self.input_norm(features.flatten(1)).view_as(features)
        if self.config.fc_norm:
            features = torch.stack([norm(features[:, number]) for number, norm in enumerate(self.fc_norm)], dim=1)
        return widen(self.fc(features.flatten(1)))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """The layer's output [rows, hidden] -> logits [rows, draft_vocab]."""
        return cast(torch.Tensor, self.lm_head(self.norm(hidden)))

    def start(
        self,
        features: torch.Tensor,
        next_tokens: torch.Tensor,
        positions: torch.Tensor,
        rows: torch.Tensor,
        sight: Sight,
    ) -> tuple[torch.Tensor, Chain]:
        """Step 0, on true features. Returns the layer's output [rows, hidden] and the chain.

        features: [tokens, 3, target_hidden]. next_tokens: int64 [tokens], the token AFTER each position (of the last
        one of a document: anything, no row looks at it). positions: int64 [tokens] in the document. rows, sight: see
        `attention`.
        """
        x, residual = self.midlayer.enter(self.embed(next_tokens), self.fuse(features))
        keys, values = self.midlayer.self_attn.keys_and_values(x, positions)
        queries = self.midlayer.self_attn.queries(x[rows], positions[rows])
        attended = attend(queries, keys, values, [], [], rows, sight)
        return self.midlayer.leave(attended, residual[rows]), Chain(keys, values, rows, sight)

    def advance(
        self, hidden: torch.Tensor, next_tokens: torch.Tensor, positions: torch.Tensor, chain: Chain
    ) -> torch.Tensor:
        """A later step, on the output of the step before: [rows, hidden] -> [rows, hidden]; the chain grows.

        next_tokens, positions: int64 [rows], one further on than at the step before.
        """
        feature = self.norm(hidden) if self.config.norm_output else hidden
        x, residual = self.midlayer.enter(self.embed(next_tokens), feature)
        keys, values = self.midlayer.self_attn.keys_and_values(x, positions)
        chain.tail_keys.append(keys)
        chain.tail_values.append(values)
        queries = self.midlayer.self_attn.queries(x, positions)
        attended = attend(
            queries, chain.keys, chain.values, chain.tail_keys, chain.tail_values, chain.rows, chain.sight
        )
        return self.midlayer.leave(attended, residual)
