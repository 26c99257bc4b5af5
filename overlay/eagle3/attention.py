"""Attention of test-time training: every row sees its document once, and its own later steps.

Step s at row p attends the rows <= p of step 0 (true features) and only its own row at steps 1..s (its own output).
That is what a draft does when it is served: the chain from row p grows a private tail on a shared prefix. The prefix
part is an ordinary causal product, the tail is one dot product a step, and one softmax runs over both, so no [rows,
rows * steps] matrix exists. Source: EAGLE-3 (Li et al. 2025), section 3; the mask of SpecForge and speculators,
written without a mask. Here it is plain matrix products, document by document, for any device and any dtype; `flex` has
it as one kernel for a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn.attention.flex_attention import BlockMask

from vllm_overlay.eagle3.flex import attend_blocks

ROWS_PER_SPAN = 256  # bounds the scores held at once to [heads, 256, document]


@dataclass(frozen=True)
class Span:
    """Query rows `[row_start, row_stop)` of one document, and the tokens they may see, `[key_start, key_stop)`."""

    row_start: int
    row_stop: int
    key_start: int
    key_stop: int


# What the rows of a batch see of its tokens, for one or the other way to compute it.
Sight = Sequence[Span] | BlockMask


def make_spans(rows: torch.Tensor, document_starts: Sequence[int], rows_per_span: int = ROWS_PER_SPAN) -> list[Span]:
    """Cut the query rows (int64 [rows], ascending token numbers of the batch) into spans of one document each.

    `document_starts`: the first token of each document, ascending, starting with 0.
    """
    bounds = torch.searchsorted(rows, torch.tensor([*document_starts[1:], torch.iinfo(torch.int64).max])).tolist()
    spans = []
    first = 0
    for document_start, last in zip(document_starts, bounds, strict=True):
        for start in range(first, last, rows_per_span):
            stop = min(start + rows_per_span, last)
            spans.append(Span(start, stop, document_start, int(rows[stop - 1]) + 1))
        first = last
    return spans


def attend(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tail_keys: Sequence[torch.Tensor],
    tail_values: Sequence[torch.Tensor],
    rows: torch.Tensor,
    sight: Sight,
) -> torch.Tensor:
    """Attention output `[rows, heads * head_dim]`.

    queries: [rows, heads, head_dim]. keys, values: [tokens, kv_heads, head_dim] of step 0. tail_keys, tail_values: one
    [rows, kv_heads, head_dim] for each later step so far. rows: int64 [rows], the token number of each query.
    """
    if isinstance(sight, BlockMask):
        return attend_blocks(queries, keys, values, tail_keys, tail_values, sight)
    return _attend_spans(queries, keys, values, tail_keys, tail_values, rows, sight)


def _attend_spans(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tail_keys: Sequence[torch.Tensor],
    tail_values: Sequence[torch.Tensor],
    rows: torch.Tensor,
    spans: Sequence[Span],
) -> torch.Tensor:
    kv_heads, head_dim = keys.shape[1:]
    group = queries.shape[1] // kv_heads
    grouped = (
        queries.view(len(queries), kv_heads, group, head_dim) * head_dim**-0.5
    )  # [rows, kv_heads, group, head_dim]
    outputs = []
    for span in spans:
        mine = slice(span.row_start, span.row_stop)
        query = grouped[mine].transpose(0, 1)  # [kv_heads, rows, group, head_dim]
        key = keys[span.key_start : span.key_stop].permute(1, 2, 0)  # [kv_heads, head_dim, tokens]
        value = values[span.key_start : span.key_stop].transpose(0, 1)  # [kv_heads, tokens, head_dim]

        shape = query.shape[:3]
        scores = (query.flatten(1, 2) @ key).view(*shape, -1)  # [kv_heads, rows, group, tokens]
        tokens = torch.arange(span.key_start, span.key_stop, device=rows.device)
        later = tokens > rows[mine, None]  # [rows, tokens]
        scores = scores.masked_fill(later[:, None], float("-inf"))
        tail = [
            (query * key_of_step[mine].transpose(0, 1)[:, :, None]).sum(-1, keepdim=True) for key_of_step in tail_keys
        ]
        weights = torch.cat([scores, *tail], dim=-1).softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32))
        weights = weights.to(value.dtype)

        prefix_weights = weights[..., : len(tokens)]
        output = (prefix_weights.flatten(1, 2) @ value).view(*shape, head_dim)  # [kv_heads, rows, group, head_dim]
        for step, value_of_step in enumerate(tail_values):
            weight = weights[..., len(tokens) + step, None]
            output = output + weight * value_of_step[mine].transpose(0, 1)[:, :, None]
        outputs.append(output.permute(1, 0, 2, 3).flatten(1))
    return torch.cat(outputs) if outputs else queries.flatten(1)


def rotate(x: torch.Tensor, positions: torch.Tensor, theta: float) -> torch.Tensor:
    """Rotary embedding (Su et al. 2021) of [rows, heads, head_dim] at positions int64 [rows], halves as in Llama."""
    half = x.shape[-1] // 2
    dtype = torch.promote_types(x.dtype, torch.float32)
    frequencies = theta ** (-torch.arange(half, device=x.device, dtype=dtype) / half)
    angles = positions[:, None] * frequencies  # [rows, half]
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    first, second = x[..., :half].to(dtype), x[..., half:].to(dtype)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)
