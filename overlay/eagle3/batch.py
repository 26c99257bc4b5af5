"""Documents packed into one batch: what is computed, what is scored, and against which state of the target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from vllm_overlay.eagle3.attention import Sight, make_spans
from vllm_overlay.eagle3.flex import make_blocks

TARGETS_PER_CHUNK = 1024  # bounds the logits held at once to [1024, draft_vocab]


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


def pack(documents: Sequence[Document], steps: int, device: torch.device, attention: str = "mask") -> Batch:
    """Pack documents for `steps` steps of test-time training. Documents never see each other.

    attention: "mask" (see `attention`) or "flex" (see `flex`). On a GPU, copies may still be under way in the current
    stream.
    """
    lengths = [len(document.token_ids) for document in documents]
    starts = torch.tensor([0, *lengths[:-1]]).cumsum(0)
    token_ids = torch.cat([document.token_ids for document in documents])
    loss_mask = torch.cat([document.loss_mask for document in documents]).bool()
    total = len(token_ids)
    start_of_token = torch.repeat_interleave(starts, torch.tensor(lengths))
    stop_of_token = start_of_token + torch.repeat_interleave(torch.tensor(lengths), torch.tensor(lengths))
    token_numbers = torch.arange(total)
    first_positions = torch.tensor([document.first_position for document in documents])
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
    final_states = [
        document.final_states[chosen] for document, chosen in zip(documents, is_target.split(lengths), strict=True)
    ]
    return Batch(
        features=_send([document.features for document in documents], device),
        next_tokens=_send([token_ids[clamped[0]]], device),
        positions=_send([token_numbers - start_of_token + first_of_token], device),
        rows=_send([rows], device),
        sight=make_blocks(rows, starts.tolist(), total, device)
        if attention == "flex"
        else make_spans(rows, starts.tolist()),
        row_tokens=[_send([token_ids[safe[rows]]], device) for safe in clamped],
        scored=[_send([index], device) for index in scored],
        scored_targets=[_send([targets], device) for targets in scored_targets],
        final_states=_send(final_states, device),
        chunks=make_chunks(scored_targets, int(is_target.sum())),
    )


def _send(parts: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """The parts one after another, on the device. From memory that cannot be paged out a GPU copies by itself, several
    times as fast."""
    if device.type == "cpu":
        return torch.cat(list(parts))
    shape = sum(map(len, parts)), *parts[0].shape[1:]
    staged = torch.empty(shape, dtype=parts[0].dtype, pin_memory=True)
    return torch.cat(list(parts), out=staged).to(device, non_blocking=True)


def make_chunks(
    scored_targets: Sequence[torch.Tensor], num_targets: int, targets_per_chunk: int = TARGETS_PER_CHUNK
) -> list[Chunk]:
    """Cut the targets; `scored_targets` (for each step int64 [n], on the CPU) ascend, so each chunk's rows are
    slices."""
    edges = torch.tensor([*range(0, num_targets, targets_per_chunk), num_targets])
    cuts = [torch.searchsorted(targets, edges).tolist() for targets in scored_targets]
    return [
        Chunk(slice(start, stop), [slice(cut[number], cut[number + 1]) for cut in cuts])
        for number, (start, stop) in enumerate(zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True))
    ]
