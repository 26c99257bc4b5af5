"""Documents packed into one batch: what is computed, what is scored, and against which state of the target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from vllm_overlay.eagle3.attention import Sight, make_spans
from vllm_overlay.eagle3.flex import make_blocks

TARGETS_PER_CHUNK = 1024  # and at times one more: bounds the logits held at once to [1025, draft_vocab]


@dataclass(frozen=True)
class Document:
    """One record, ready to learn from. N is the target's number of layers.

    token_ids: int64 [T]. features: [T, 3, target_hidden]. final_states: [T, target_hidden], layer id N, before the
    final norm.
    loss_mask: bool [T], True at the tokens whose states are targets. first_position: of the first token in its request.
    """

    token_ids: torch.Tensor
    features: torch.Tensor
    final_states: torch.Tensor
    loss_mask: torch.Tensor
    first_position: int = 0


class Text(Protocol):
    """What a batch wants to know of a document beside its states; as in `Document`."""

    @property
    def token_ids(self) -> torch.Tensor: ...

    @property
    def loss_mask(self) -> torch.Tensor: ...

    @property
    def first_position(self) -> int: ...


@dataclass(frozen=True)
class Columns:
    """Which of a row's layers are which: three features, a slice where they are neighbours, and the last state."""

    features: slice | list[int]
    final: int


@dataclass(frozen=True)
class Chunk:
    """Some of a batch's `final_states`, and for each step the slice of `scored` that is scored against them."""

    targets: slice
    rows: list[slice]


@dataclass(frozen=True)
class Batch:
    """Packed documents. Row p at step s reads token p+1+s at position p+s and is scored against the state at p+1+s.

    Only rows with something to score at some step are computed (`rows`); all tokens are keys.
    """

    features: torch.Tensor  # [tokens, 3, target_hidden], in the store's dtype
    next_tokens: torch.Tensor  # int64 [tokens]
    positions: torch.Tensor  # int64 [tokens]
    rows: torch.Tensor  # int64 [rows], token numbers
    sight: Sight
    row_tokens: list[torch.Tensor]  # for each step: int64 [rows], the token each row reads
    scored: list[torch.Tensor]  # for each step: int64 [n], which of `rows` are scored
    scored_targets: list[torch.Tensor]  # for each step: int64 [n], which of `final_states` they are scored against
    final_states: torch.Tensor  # [targets, target_hidden]: the states at every masked token that some row predicts
    chunks: list[Chunk]

    @property
    def num_tokens(self) -> int:
        return len(self.positions)


def pack(
    texts: Sequence[Text],
    states: torch.Tensor,
    columns: Columns,
    steps: int,
    device: torch.device,
    attention: str = "mask",
) -> Batch:
    """Pack documents for `steps` steps of test-time training. They never see each other.

    states: `[tokens, layers, target_hidden]`, on the CPU, those of one document after those of the other. attention:
    "mask" (see `attention`) or "flex" (see `flex`). On a GPU, copies may still be under way in the current stream.
    """
    lengths = [len(text.token_ids) for text in texts]
    starts = torch.tensor([0, *lengths[:-1]]).cumsum(0)
    token_ids = torch.cat([text.token_ids for text in texts])
    loss_mask = torch.cat([text.loss_mask for text in texts]).bool()
    total = len(token_ids)
    start_of_token = torch.repeat_interleave(starts, torch.tensor(lengths))
    stop_of_token = start_of_token + torch.repeat_interleave(torch.tensor(lengths), torch.tensor(lengths))
    token_numbers = torch.arange(total)
    first_positions = torch.tensor([text.first_position for text in texts])
    first_of_token = torch.repeat_interleave(first_positions, torch.tensor(lengths))

    # A shift past the document's end finds nothing to score; the clamp only keeps the index legal.
    shifted = [token_numbers + 1 + step for step in range(steps)]
    clamped = [index.minimum(stop_of_token - 1) for index in shifted]
    counts = [(index < stop_of_token) & loss_mask[safe] for index, safe in zip(shifted, clamped, strict=True)]
    active = torch.stack(counts).any(0)
    rows = active.nonzero()[:, 0]

    is_target = loss_mask & (token_numbers > start_of_token)
    target_number = is_target.cumsum(0) - 1
    scored = [count[rows].nonzero()[:, 0] for count in counts]
    scored_targets = [target_number[safe[rows[index]]] for safe, index in zip(clamped, scored, strict=True)]
    sent = states.to(device, non_blocking=True)
    return Batch(
        features=sent[:, columns.features],
        next_tokens=_send(token_ids[clamped[0]], device),
        positions=_send(token_numbers - start_of_token + first_of_token, device),
        rows=_send(rows, device),
        sight=make_blocks(rows, starts.tolist(), total, device)
        if attention == "flex"
        else make_spans(rows, starts.tolist()),
        row_tokens=[_send(token_ids[safe[rows]], device) for safe in clamped],
        scored=[_send(index, device) for index in scored],
        scored_targets=[_send(targets, device) for targets in scored_targets],
        final_states=sent[_send(is_target.nonzero()[:, 0], device), columns.final],
        chunks=make_chunks(scored_targets, int(is_target.sum())),
    )


def _send(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """From memory that cannot be paged out a GPU copies by itself, while the host goes on."""
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def make_chunks(
    scored_targets: Sequence[torch.Tensor], num_targets: int, targets_per_chunk: int = TARGETS_PER_CHUNK
) -> list[Chunk]:
    """Cut the targets; `scored_targets` (for each step int64 [n], on the CPU) ascend, so each chunk's rows are
    slices."""
    starts = range(0, num_targets, targets_per_chunk)
    if len(starts) > 1 and num_targets - starts[-1] == 1:
        starts = starts[:-1]  # for one target alone torch would compile once more (2.11, seen on an H200)
    edges = torch.tensor([*starts, num_targets])
    cuts = [torch.searchsorted(targets, edges).tolist() for targets in scored_targets]
    return [
        Chunk(slice(start, stop), [slice(cut[number], cut[number + 1]) for cut in cuts])
        for number, (start, stop) in enumerate(zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True))
    ]
