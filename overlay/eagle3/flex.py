"""The same attention by PyTorch's flex attention: one kernel over all documents of a batch, in blocks of 128 x 128.

The prefix part is flex attention, which also returns the log of its sum of exponents; with it and the scores of the
tail, a softmax over the parts weighs the prefix's output against the tail's values, and nothing is approximated.
Sources: Dong et al. 2024, "Flex Attention"; Milakov and Gimelshein 2018 for the merge.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn.attention import flex_attention as flex
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from vllm_overlay.eagle3.target import widen

BLOCK = 128
SMALLEST_HEAD = 16  # flex attention's kernels on a GPU take no smaller ones


def make_blocks(rows: torch.Tensor, document_starts: Sequence[int], num_tokens: int, device: torch.device) -> BlockMask:
    """What each query row sees of the tokens: its document, up to itself.

    rows: int64 [rows], ascending token numbers of the batch, on the CPU. `document_starts`: the first token of each
    document, ascending, starting with 0. As both ascend, the first and the last row of a block tell what all of it
    sees: a mask of [rows, tokens] is never made.
    """
    starts = torch.tensor(document_starts)
    first = starts[torch.searchsorted(starts, rows, right=True) - 1]  # [rows], the first token that each sees
    top = torch.arange(0, len(rows), BLOCK)  # [blocks of rows], row numbers
    bottom = (top + BLOCK - 1).clamp(max=len(rows) - 1)
    edges = torch.arange(0, num_tokens, BLOCK)  # [blocks of tokens]
    # Some row sees something of a block of tokens if the last row that begins before its end reaches it.
    last_before = torch.searchsorted(first, edges + BLOCK) - 1  # [blocks of tokens], row numbers
    nearest = torch.minimum(last_before, bottom[:, None])  # [blocks of rows, blocks of tokens]
    seen = (nearest >= top[:, None]) & (rows[nearest.clamp(min=0)] >= edges)
    # Every row sees all of it if the last one begins before it, and the first one reaches its end.
    is_whole = top + BLOCK <= len(rows)
    full = is_whole[:, None] & (first[bottom][:, None] <= edges) & (rows[top][:, None] >= edges + BLOCK - 1)
    lower, upper = first.int().to(device), rows.int().to(device)

    def sees(batch: torch.Tensor, head: torch.Tensor, row: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
        return (token >= lower[row]) & (token <= upper[row])

    mask = BlockMask.from_kv_blocks(
        *_list_blocks(seen & ~full), *_list_blocks(full), BLOCK_SIZE=BLOCK, mask_mod=sees,
        seq_lengths=(len(rows), num_tokens),
    )  # fmt: skip
    moved: BlockMask = mask.to(device)
    return moved


def _list_blocks(chosen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """bool [n, m] -> how many of each row, int32 [1, 1, n], and their numbers, these first, int32 [1, 1, n, m]."""
    numbers = torch.argsort(chosen.int(), dim=1, descending=True, stable=True)
    return chosen.sum(1).int()[None, None], numbers.int()[None, None]


def attend_blocks(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tail_keys: Sequence[torch.Tensor],
    tail_values: Sequence[torch.Tensor],
    mask: BlockMask,
) -> torch.Tensor:
    """As `attention.attend`, in its shapes."""
    prefix, log_sum = _attend_prefix(queries, keys, values, mask)  # [rows, heads, head_dim], [rows, heads]
    if not tail_keys:
        return prefix.flatten(1)
    kv_heads, head_dim = keys.shape[1:]
    shape = len(queries), kv_heads, queries.shape[1] // kv_heads
    query = widen(queries).view(*shape, head_dim) * head_dim**-0.5
    tail = [(query * widen(key)[:, :, None]).sum(-1) for key in tail_keys]  # each [rows, kv_heads, group]
    weights = torch.stack([log_sum.view(shape), *tail], dim=-1).softmax(-1)
    output = weights[..., 0, None] * prefix.view(*shape, head_dim)
    for step, value in enumerate(tail_values):
        output = output + weights[..., 1 + step, None] * widen(value)[:, :, None]
    return output.flatten(1).to(queries.dtype)


def _attend_prefix(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: BlockMask
) -> tuple[torch.Tensor, torch.Tensor]:
    """The output `[rows, heads, head_dim]` and the natural logarithm of each sum of exponents, float32 `[rows,
    heads]`."""
    query, key, value = (tensor.transpose(0, 1)[None] for tensor in (queries, keys, values))
    # Within a step that is compiled as a whole, flex attention is compiled with it.
    by_itself = queries.device.type == "cuda" and not torch.compiler.is_compiling()
    output, log_sum = (_compile_flex() if by_itself else _flex)(query, key, value, mask)
    return output[0].transpose(0, 1), log_sum[0].transpose(0, 1)


@functools.cache
def _compile_flex() -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    return torch.compile(_flex, dynamic=True)


def _flex(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: BlockMask
) -> tuple[torch.Tensor, torch.Tensor]:
    result: Any = flex_attention(query, key, value, block_mask=mask, enable_gqa=True, **_WITH_LOG_SUM)
    output, aux = result
    return output, getattr(aux, "lse", aux)


# torch 2.8 has no AuxRequest, and later releases are to drop `return_lse`.
_WITH_LOG_SUM: dict[str, Any] = (
    {"return_aux": flex.AuxRequest(lse=True)} if hasattr(flex, "AuxRequest") else {"return_lse": True}
)
