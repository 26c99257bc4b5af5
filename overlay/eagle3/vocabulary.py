"""The draft vocabulary: the target's tokens that the draft can propose, and the two maps between them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from vllm_overlay.errors import OverlayError

COUNTED_AT_ONCE = 1024  # documents


@dataclass(frozen=True)
class DraftVocabulary:
    """`ids`: int64 [draft_vocab], ascending target ids. `vocab_size`: the target's."""

    ids: torch.Tensor
    vocab_size: int

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def is_full(self) -> bool:
        return len(self.ids) == self.vocab_size

    @property
    def d2t(self) -> torch.Tensor:
        """int64 [draft_vocab]: OFFSETS, target id = draft id + d2t[draft id] (as vLLM's draft class reads it)."""
        return self.ids - torch.arange(len(self.ids))

    @property
    def t2d(self) -> torch.Tensor:
        """bool [vocab]: whether the draft knows the target's token."""
        known = torch.zeros(self.vocab_size, dtype=torch.bool)
        known[self.ids] = True
        return known

    def save(self, path: Path) -> None:
        save_file({"d2t": self.d2t, "t2d": self.t2d}, str(path))

    @staticmethod
    def load(path: Path) -> DraftVocabulary:
        tensors = load_file(str(path))
        d2t = tensors["d2t"]
        return DraftVocabulary(d2t + torch.arange(len(d2t)), len(tensors["t2d"]))


def count_tokens(
    documents: Iterable[tuple[torch.Tensor, torch.Tensor]], vocab_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Counts of (token_ids int64 [T], loss_mask bool [T]) pairs: under the mask, and over all tokens; both int64
    [vocab].

    Raises OverlayError: a token id outside the target's vocabulary.
    """
    counted = torch.zeros(vocab_size, dtype=torch.int64)
    present = torch.zeros(vocab_size, dtype=torch.int64)
    for some in _take_some(documents):
        token_ids, loss_mask = (torch.cat(parts) for parts in zip(*some, strict=True))
        largest = int(token_ids.max())
        if largest >= vocab_size:
            raise OverlayError(
                f"the store holds token id {largest}, the model's vocabulary has {vocab_size}: wrong --model?"
            )
        present += torch.bincount(token_ids, minlength=vocab_size)
        counted += torch.bincount(token_ids[loss_mask], minlength=vocab_size)
    return counted, present


def _take_some(
    documents: Iterable[tuple[torch.Tensor, torch.Tensor]],
) -> Iterator[list[tuple[torch.Tensor, torch.Tensor]]]:
    """Documents by the thousand: counting goes over the whole vocabulary each time."""
    iterator = iter(documents)
    while some := list(islice(iterator, COUNTED_AT_ONCE)):
        yield some


def choose_vocabulary(
    counted: torch.Tensor, present: torch.Tensor, size: int, special_token_ids: Iterable[int] = ()
) -> DraftVocabulary:
    """The `size` most frequent ids, ties to the smaller id; special tokens that occur in the data are always kept.

    `counted` and `present`: int64 [vocab] from `count_tokens`. Raises OverlayError: a size that does not fit.
    """
    vocab_size = len(counted)
    kept = [token for token in sorted(set(special_token_ids)) if token < vocab_size and present[token] > 0]
    if not max(1, len(kept)) <= size <= vocab_size:
        raise OverlayError(
            f"--draft-vocab-size {size}: must be between {max(1, len(kept))} and the model's {vocab_size}"
        )
    ranked = counted.clone()
    ranked[kept] = torch.iinfo(torch.int64).max
    most_frequent = torch.sort(ranked, descending=True, stable=True).indices[:size]
    return DraftVocabulary(most_frequent.sort().values, vocab_size)
