"""Records of stores as training documents: layers found by id, unusable records counted, batches planned."""

from __future__ import annotations

import hashlib
import operator
import random
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass
from functools import reduce
from itertools import accumulate
from pathlib import Path

import torch

from vllm_overlay.eagle3.batch import Columns, Document
from vllm_overlay.errors import OverlayError
from vllm_overlay.store import Record, Store, StoreMeta


@dataclass(frozen=True)
class Entry:
    """One usable record: where it is, and what is small enough to keep in memory.

    token_ids: int64 [T]; loss_mask: bool [T]; both cut to the longest length allowed.
    num_prompt_tokens: of the record, not cut. first_position: where it begins in its request, 0 but for windows.
    """

    store: int
    index: int
    key: str
    token_ids: torch.Tensor
    loss_mask: torch.Tensor
    num_prompt_tokens: int
    first_position: int

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True)
class Skipped:
    """Records that are not trained on, and how many were cut."""

    incomplete: int = 0
    unmasked: int = 0  # nothing under the loss mask, or a single token
    truncated: int = 0

    def __add__(self, other: Skipped) -> Skipped:
        return Skipped(*map(operator.add, astuple(self), astuple(other)))


class Corpus:
    """The usable records of some stores that hold the same layers of the same model."""

    def __init__(
        self, stores: list[Store], feature_ids: tuple[int, ...], entries: list[Entry], skipped: Skipped
    ) -> None:
        self.stores = stores
        self.feature_ids = feature_ids
        self.entries = entries
        self.skipped = skipped
        columns = list(stores[0].layer_ids)
        features = [columns.index(layer) for layer in feature_ids]
        final = columns.index(stores[0].meta.num_hidden_layers)
        self._in_store = Columns(_view_neighbours(features), final)
        self._used = sorted({*features, final})
        self.columns = Columns(_view_neighbours([*map(self._used.index, features)]), self._used.index(final))

    @property
    def meta(self) -> StoreMeta:
        return self.stores[0].meta

    def add(self, store: int, numbers: Iterable[int], max_length: int) -> None:
        """Read the tokens and masks of these records of a store."""
        entries, skipped = read_entries(self.stores[store], store, numbers, max_length)
        self.entries += entries
        self.skipped += skipped

    def digest(self) -> str:
        """Changes when a record, a token or a mask does: an exact resume needs the same data."""
        digest = hashlib.sha256()
        for entry in self.entries:
            place = f"{entry.first_position}+{entry.num_tokens}"
            digest.update(f"{entry.store}/{entry.index}/{entry.key}/{place}\n".encode())
            digest.update(entry.token_ids.numpy().tobytes() + entry.loss_mask.numpy().tobytes())
        return digest.hexdigest()

    def document(self, entry: Entry) -> Document:
        """Read the states of one record, in the store's dtype."""
        states = self.stores[entry.store][entry.index].hidden_states[: entry.num_tokens]  # [T, layers, hidden]
        features, final = states[:, self._in_store.features], states[:, self._in_store.final]
        return Document(entry.token_ids, features, final, entry.loss_mask, entry.first_position)

    def read_states(self, entries: Sequence[Entry], *, pinned: bool = False) -> torch.Tensor:
        """Those of many records, one after another, of the layers that are trained on: `[tokens, layers, hidden]`,
        `columns` says which is which. In the dtype that holds those of all stores.

        pinned: in memory that cannot be paged out, from which a GPU copies by itself and several times as fast.
        """
        ends = list(accumulate(entry.num_tokens for entry in entries))
        dtype = reduce(torch.promote_types, (store.meta.torch_dtype for store in self.stores))
        shape = ends[-1], len(self._used), self.meta.hidden_size
        states = torch.empty(shape, dtype=dtype, pin_memory=pinned)
        places = [slice(end - entry.num_tokens, end) for entry, end in zip(entries, ends, strict=True)]
        for number, store in enumerate(self.stores):
            mine = [(entry.index, place) for entry, place in zip(entries, places, strict=True) if entry.store == number]
            if len(store.layer_ids) == len(self._used) and store.meta.torch_dtype is dtype:
                store.read_states([index for index, _ in mine], [place for _, place in mine], states)
                continue
            for index, place in mine:
                states[place] = store[index].hidden_states[: place.stop - place.start, self._used]
        return states

    def close(self) -> None:
        for store in self.stores:
            store.close()


def _view_neighbours(columns: list[int]) -> slice | list[int]:
    """Neighbours are read as a view, others are copied."""
    first = columns[0]
    return slice(first, first + len(columns)) if columns == [*range(first, first + len(columns))] else columns


def default_features(num_hidden_layers: int) -> tuple[int, ...]:
    """The EAGLE-3 layers 2, N//2, N-3 (SafeAILab's 1, N//2-1, N-4, counted as the stream after k layers)."""
    return 2, num_hidden_layers // 2, num_hidden_layers - 3


def open_stores(paths: Sequence[str | Path], feature_ids: tuple[int, ...] | None = None) -> Corpus:
    """Open stores, without reading a record.

    Raises OverlayError: stores that disagree, a layer id that a store does not have.
    """
    stores = [Store.open(path) for path in paths]
    first = stores[0]
    for path, store in zip(paths, stores, strict=True):
        for fact in ("model_fingerprint", "hidden_size", "num_hidden_layers"):
            found, wanted = getattr(store.meta, fact), getattr(first.meta, fact)
            if found != wanted:
                raise OverlayError(
                    f"{path}: {fact} is {found!r}, in {paths[0]} {wanted!r}; train on stores of one model"
                )
        if tuple(store.layer_ids) != tuple(first.layer_ids):
            raise OverlayError(
                f"{path}: holds layers {list(store.layer_ids)}, {paths[0]} holds {list(first.layer_ids)}"
            )
    feature_ids = feature_ids or default_features(first.meta.num_hidden_layers)
    _require_layers(first, paths[0], feature_ids)
    return Corpus(stores, feature_ids, [], Skipped())


def open_corpus(
    paths: Sequence[str | Path], feature_ids: tuple[int, ...] | None = None, max_length: int = 4096
) -> Corpus:
    """Open stores and read every record's tokens and mask (not its states).

    Raises OverlayError: as `open_stores`, or nothing to learn from.
    """
    corpus = open_stores(paths, feature_ids)
    for number, store in enumerate(corpus.stores):
        corpus.add(number, range(len(store)), max_length)
    if not corpus.entries:
        raise OverlayError(
            f"{', '.join(map(str, paths))}: nothing to learn from: {corpus.skipped.incomplete} incomplete record(s), "
            f"{corpus.skipped.unmasked} without a token under the loss mask"
        )
    return corpus


def read_entries(
    store: Store, store_number: int, numbers: Iterable[int], max_length: int
) -> tuple[list[Entry], Skipped]:
    """The usable ones of these records, and how many are not."""
    entries: list[Entry] = []
    incomplete = unmasked = truncated = 0
    for index in numbers:
        record = store[index]
        if not record.complete:
            incomplete += 1
            continue
        entry = _read_entry(record, store_number, index, max_length)
        if not entry.loss_mask[1:].any():
            unmasked += 1
            continue
        truncated += len(record.token_ids) > max_length
        entries.append(entry)
    return entries, Skipped(incomplete, unmasked, truncated)


def _require_layers(store: Store, path: str | Path, feature_ids: tuple[int, ...]) -> None:
    final = store.meta.num_hidden_layers
    if len(feature_ids) != 3:
        raise OverlayError(f"--features {','.join(map(str, feature_ids))}: three layer ids are needed")
    missing = [layer for layer in (*feature_ids, final) if layer not in store.layer_ids]
    if missing:
        raise OverlayError(
            f"{path}: has layers {list(store.layer_ids)}, not {missing}; training needs features {list(feature_ids)} "
            f"and the last state {final}: capture again with --layers, or choose --features"
        )


def _read_entry(record: Record, store: int, index: int, max_length: int) -> Entry:
    """`loss_mask` None means: every generated token."""
    token_ids = record.token_ids[:max_length].clone()
    mask = record.loss_mask
    if mask is None:
        mask = torch.arange(len(record.token_ids)) >= record.num_prompt_tokens
    key = f"{record.request_id}/{record.tag or ''}"
    loss_mask = mask[:max_length].clone().bool()
    return Entry(store, index, key, token_ids, loss_mask, record.num_prompt_tokens, record.first_position)


def is_held_out(key: str, fraction: float) -> bool:
    """Stable: depends on the record's name alone, not on the other records, their order or the seed."""
    digest = hashlib.sha256(key.encode()).digest()
    return int.from_bytes(digest[:8], "big") < fraction * 2**64


def split(entries: Sequence[Entry], holdout: float) -> tuple[list[Entry], list[Entry]]:
    """(training, held out). Raises OverlayError where nothing is left to train on."""
    training = [entry for entry in entries if not is_held_out(entry.key, holdout)]
    held_out = [entry for entry in entries if is_held_out(entry.key, holdout)]
    if not training:
        raise OverlayError(f"--holdout {holdout}: no record is left to train on, of {len(entries)}")
    return training, held_out


def plan_batches(entries: Sequence[Entry], batch_tokens: int) -> list[list[Entry]]:
    """Fill batches up to `batch_tokens` in the order given; a longer record makes a batch of its own."""
    batches: list[list[Entry]] = []
    filled = batch_tokens
    for entry in entries:
        if filled + entry.num_tokens > batch_tokens or not batches:
            batches.append([])
            filled = 0
        batches[-1].append(entry)
        filled += entry.num_tokens
    return batches


def plan_epoch(entries: Sequence[Entry], batch_tokens: int, seed: int, epoch: int) -> list[list[Entry]]:
    """The batches of one epoch. A function of (seed, epoch) alone, so a resumed run needs no random state."""
    shuffled = list(entries)
    random.Random(f"{seed}/{epoch}").shuffle(shuffled)
    return plan_batches(shuffled, batch_tokens)


def deal(entries: Sequence[Entry], hands: int) -> list[list[Entry]]:
    """The records of a batch over `hands` ranks: the longest first, each to the hand with the fewest tokens so far."""
    dealt: list[list[Entry]] = [[] for _ in range(hands)]
    filled = [0] * hands
    for entry in sorted(entries, key=lambda entry: -entry.num_tokens):
        hand = filled.index(min(filled))
        dealt[hand].append(entry)
        filled[hand] += entry.num_tokens
    return dealt


def count_scored(entries: Sequence[Entry], steps: int) -> list[int]:
    """How many rows each step of test-time training scores: at step s, row p wants the mask at p + 1 + s."""
    lengths = torch.tensor([entry.num_tokens for entry in entries])
    in_document = torch.arange(int(lengths.sum())) - torch.repeat_interleave(lengths.cumsum(0) - lengths, lengths)
    positions = in_document[torch.cat([entry.loss_mask for entry in entries])]  # of the masked tokens
    return [int((positions > step).sum()) for step in range(steps)]
