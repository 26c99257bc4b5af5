"""The reading side. It is read-only, needs no vLLM, and is right while writers are at work."""

from __future__ import annotations

import operator
import os
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from types import TracebackType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_overlay.store.checksum import COMPUTE_CHECKSUM
from vllm_overlay.store.errors import IncompleteRecordError, StoreError
from vllm_overlay.store.extents import EXTENT_BYTES, HOLE, Extents, find_holes, number_rows, unpack_extents
from vllm_overlay.store.files import Piece, StoreFiles
from vllm_overlay.store.float8 import unpack_rows
from vllm_overlay.store.index import Index
from vllm_overlay.store.log import ShardRows
from vllm_overlay.store.meta import StoreMeta
from vllm_overlay.store.remote import StorePath, find_files, find_path

COLUMNS = "id, request_id, num_prompt_tokens, complete, finish_reason, tag, loss_mask, token_ids, log, extents"
LARGEST_ID = 2**63 - 1  # of SQLite


class LogShards:
    """The shards of a log, in the order of its rows, and where each begins and ends: int64 `[shards]`."""

    def __init__(self, shards: list[ShardRows]) -> None:
        self.shards = shards
        self.first = np.array([shard.first_row for shard in shards], dtype=np.int64)
        self.stop = self.first + np.array([shard.rows for shard in shards], dtype=np.int64)

    @property
    def end(self) -> int:
        """The number after the last row's."""
        return int(self.stop[-1]) if self.shards else 0

    def find(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Which shard each row `[n]` is in, and whether it is in any."""
        at = np.searchsorted(self.first, rows, side="right") - 1
        if not self.shards:
            return at, np.zeros(len(rows), dtype=bool)
        return at, (at >= 0) & (rows < self.stop[at])


class LogRows:
    """The rows of all logs, found in the store's files."""

    def __init__(self, files: StoreFiles[StorePath]) -> None:
        self._files = files
        self._metas: dict[int, StoreMeta] = {}
        self._shards: dict[int, LogShards] = {}

    @property
    def folder(self) -> StorePath:
        """The store's."""
        return self._files.path

    def learn(self, log: int, index: Index) -> None:
        """Read which layers the log has, and which shards by now. A writer that is at work adds to them."""
        self._metas[log] = index.read_log_meta(log)
        found = LogShards(index.read_shards(log))
        # Another thread may have learnt more meanwhile, and may be reading: the newer ones, and all at once.
        if log not in self._shards or found.end > self._shards[log].end:
            self._shards[log] = found

    def meta(self, log: int) -> StoreMeta:
        """What is true of the log's rows."""
        return self._metas[log]

    def knows(self, log: int, end: int) -> bool:
        return log in self._shards and end <= self._shards[log].end

    def split(self, log: int, start: int, count: int) -> Iterator[Piece]:
        """The rows, cut where one shard ends and the next begins."""
        shards = self._shards[log].shards
        at = bisect_right(shards, start, key=lambda shard: shard.first_row) - 1
        while count:
            if not 0 <= at < len(shards) or start >= shards[at].first_row + shards[at].rows:
                raise StoreError(f"rows {start}..{start + count - 1} of log {log} are in no shard of {self.folder}")
            shard = shards[at]
            first = start - shard.first_row
            here = min(count, shard.rows - first)
            yield Piece(shard.file, first, here)
            start, count, at = start + here, count - here, at + 1

    def join(self, log: int, extents: Extents) -> torch.Tensor:
        """The rows of extents without holes, `[rows, the log's layers, hidden]`: a view of one shard's map, or a copy,
        as those in float8 always are.

        Raises StoreError if a shard is missing or cut short.
        """
        meta = self._metas[log]
        pieces = list(self.split(log, *extents[0].tolist())) if len(extents) == 1 else []
        if len(pieces) == 1:
            rows = self._files.view(pieces[0], meta)
        else:
            numbers = number_rows(extents)
            rows = torch.empty((len(numbers), *meta.stored_shape), dtype=meta.stored_dtype)
            self.copy(log, numbers, np.arange(len(numbers)), rows)
        return unpack_rows(rows) if meta.is_packed else rows

    def copy(self, log: int, rows: NDArray[np.int64], places: NDArray[np.int64], out: torch.Tensor) -> None:
        """Copy rows `[n]` of a log, as they are stored, to their places `[n]` in `out`.

        Of a request that was decoded beside others every row lies by itself. Raises StoreError as `join`.
        """
        meta, log_shards = self._metas[log], self._shards[log]
        at, found = log_shards.find(rows)
        if not found.all():
            raise StoreError(f"row {rows[~found][0]} of log {log} is in no shard of {self.folder}")
        content = out.flatten(1).view(torch.uint8).numpy()  # [rows, bytes of a row], the same memory
        breaks = np.flatnonzero((np.diff(at) != 0) | (np.diff(places) != 1)) + 1
        for begin, end in pairwise([0, *breaks.tolist(), len(rows)]):
            shard, place = log_shards.shards[at[begin]], int(places[begin])
            self._files.take(shard.file, rows[begin:end] - shard.first_row, meta, content[place : place + end - begin])

    def read_into(self, log: int, start: int, out: memoryview) -> None:
        """Fill `out` with the bytes of rows from `start` on, as they are in the files now."""
        meta = self._metas[log]
        for piece in self.split(log, start, len(out) // meta.row_bytes):
            self._files.read_into(piece, meta, out[: piece.count * meta.row_bytes])
            out = out[piece.count * meta.row_bytes :]


@dataclass(frozen=True)
class RecordPart:
    """Where a record's rows are: extents of a log. A record has one part for each pipeline stage that wrote layers."""

    log: int
    extents: Extents


@dataclass(frozen=True, eq=False)
class Record:
    """T tokens of one captured request, from its position `first_position` on: 0 unless a window of it was asked for.

    token_ids: int64 [T]. num_prompt_tokens: how many of these T are the prompt's; they come first. loss_mask: bool [T],
    or None if capture knew of none.
    """

    request_id: str
    token_ids: torch.Tensor = field(repr=False)
    num_prompt_tokens: int
    loss_mask: torch.Tensor | None = field(repr=False)
    complete: bool
    finish_reason: str
    tag: str | None
    first_position: int
    _layer_ids: tuple[int, ...] = field(repr=False)
    _parts: tuple[RecordPart, ...] = field(repr=False)
    _rows: LogRows = field(repr=False)

    @property
    def hidden_states(self) -> torch.Tensor:
        """`[T, layers, hidden]` on the CPU, in the store's dtype and its order of layers; of float8 a copy in bfloat16.

        If the rows lie together in one shard this is a view of the file's map, shared by all records of the store: do
        not write to it. Otherwise it is a copy. Raises IncompleteRecordError if positions have no row, StoreError if a
        shard is missing or cut short.
        """
        self._refuse_holes()
        if len(self._parts) == 1:
            return self._rows.join(self._parts[0].log, self._parts[0].extents)
        rows = {part.log: self._rows.join(part.log, part.extents) for part in self._parts}
        columns = {  # [T, hidden] each
            layer_id: rows[log][:, column]
            for log in rows
            for column, layer_id in enumerate(self._rows.meta(log).layer_ids)
        }
        return torch.stack([columns[layer_id] for layer_id in self._layer_ids], dim=1)

    def _refuse_holes(self) -> None:
        holes = sorted({hole for part in self._parts for hole in find_holes(part.extents)})
        if holes:
            begin = self.first_position
            shifted = [(begin + first, begin + last) for first, last in holes]
            missing = ", ".join(f"{first}-{last}" if last > first else f"{first}" for first, last in shifted)
            raise IncompleteRecordError(
                f"record {self.request_id!r} of {self._rows.folder} is incomplete: "
                f"positions {missing} of {begin}-{begin + len(self.token_ids) - 1} have no hidden states"
            )


@dataclass(frozen=True)
class Wanted:
    """A record of one part to be read, and its place in a tensor. extents: packed."""

    number: int
    place: slice
    extents: bytes


@dataclass(frozen=True)
class Damage:
    """What is wrong with record `index` of a store. rows: what it is made of, by file, counted within the file."""

    index: int
    request_id: str
    rows: tuple[str, ...]
    problem: str

    def __str__(self) -> str:
        return f"record {self.index} ({self.request_id!r}): {self.problem}; its rows: {', '.join(self.rows)}"


class Store:
    """A store, open for reading: a sequence of records in the order they were committed. Make one with `Store.open`.

    `store[i]` and iteration give records, `store["request-id"]` the newest with that id. Records that writers commit
    meanwhile show up. It may be used after a fork and be sent to another process.
    """

    def __init__(self, folder: StorePath) -> None:
        self._folder = folder
        self._files = find_files(folder)
        self._index = self._files.open_index()
        self._pid = os.getpid()
        try:
            self.meta = self._index.read_meta()
            self._compute_checksum = COMPUTE_CHECKSUM[self._index.version]
        except BaseException:
            self._index.close()
            raise
        self._rows = LogRows(self._files)

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Store:
        """The store in this folder; those of several replicas in it are read as one.

        A URL that fsspec knows (s3://...) is a remote folder, read as it is now (see remote.py). Raises StoreError if
        there is no store, it was written by a newer release, or it is remote and a writer is at work in it.
        """
        from vllm_overlay.store.joined import JoinedStore, find_members  # which build on this class

        folder = find_path(path)
        return JoinedStore.join(folder) if any(found != folder for found in find_members(folder)) else cls(folder)

    @property
    def members(self) -> tuple[Store, ...]:
        """The stores, each with an index of its own, that this one is read from."""
        return (self,)

    @property
    def path(self) -> StorePath:
        return self._folder

    @property
    def files(self) -> StoreFiles[StorePath]:
        """Those of this one store."""
        return self._files

    @property
    def layer_ids(self) -> tuple[int, ...]:
        """The columns of `hidden_states`: 0 is the embedding output, k the residual stream after k decoder layers."""
        return self.meta.layer_ids

    @property
    def index(self) -> Index:
        """The connection of this process: one of SQLite must not be carried over a fork."""
        if self._pid != os.getpid():
            self._index, self._pid = self._files.open_index(), os.getpid()
        return self._index

    def __len__(self) -> int:
        return int(self.index.execute("SELECT coalesce(max(id), 0) FROM records")[0][0])

    def __iter__(self) -> Iterator[Record]:
        """The records that there are when the iteration begins."""
        return (self[number] for number in range(len(self)))

    def __contains__(self, request_id: object) -> bool:
        return bool(self.index.execute("SELECT 1 FROM records WHERE request_id = ? LIMIT 1", (request_id,)))

    def __getitem__(self, key: int | str) -> Record:
        """Raises IndexError or KeyError if there is no such record."""
        if isinstance(key, str):
            newest = "FROM records WHERE request_id = ? ORDER BY id DESC LIMIT 1"
            found = self.index.execute(f"SELECT {self._columns} {newest}", (key,))
            if not found:
                raise KeyError(f"{self._folder} has no record of request {key!r}")
            return self._make_record(found[0])
        return self._make_record(self._fetch(operator.index(key), self._columns))

    def read_states(self, numbers: Sequence[int], places: Sequence[slice], out: torch.Tensor) -> None:
        """Copy the hidden states of records into `out` `[tokens, layers, hidden]`, a contiguous tensor of the rows'
        dtype on the CPU: of each as many of its first tokens as its place there has room for.

        Many records at once take less time than each by itself, but for those that pipeline stages wrote. Raises as
        `hidden_states` of one that fails, and ValueError if `out` is another tensor, or a place is outside it or larger
        than its record.
        """
        self._refuse_misfit(out)
        parts = self.index.read_lone_parts([number + 1 for number in numbers])
        by_log: dict[int, list[Wanted]] = {}
        for number, place in zip(numbers, places, strict=True):
            if number + 1 in parts:
                log, extents = parts[number + 1]
                by_log.setdefault(log, []).append(Wanted(number, place, extents))
            else:
                self._read_one(number, place, out)
        for log, several in by_log.items():
            self._read_several(log, several, out)

    def _read_one(self, number: int, place: slice, out: torch.Tensor) -> None:
        states = self[number].hidden_states
        _refuse_place(number, place, len(states), len(out))
        out[place] = states[: place.stop - place.start]

    def _read_several(self, log: int, several: list[Wanted], out: torch.Tensor) -> None:
        """Records of one part each. All extents at once: the calls that numpy needs for the few extents of one record
        took longer than the copy of its rows."""
        extents = unpack_extents(b"".join(wanted.extents for wanted in several))
        if (extents[:, 0] == HOLE).any():
            for wanted in several:
                self._read_one(wanted.number, wanted.place, out)
            return
        ends = np.cumsum(extents[:, 1])
        last = np.cumsum([len(wanted.extents) // EXTENT_BYTES for wanted in several]) - 1
        tokens = np.diff(ends[last], prepend=0)  # [records]
        for wanted, length in zip(several, tokens.tolist(), strict=True):
            _refuse_place(wanted.number, wanted.place, length, len(out))
        starts, stops = np.array([(wanted.place.start, wanted.place.stop) for wanted in several]).T  # [records] each
        positions = np.arange(ends[-1]) - np.repeat(ends[last] - tokens, tokens)  # [rows], each in its record
        used = positions < np.repeat(stops - starts, tokens)
        rows = number_rows(self._learn(RecordPart(log, extents)).extents)[used]
        in_out = (positions + np.repeat(starts, tokens))[used]
        if self.meta.is_packed:
            packed = torch.empty((len(rows), *self.meta.stored_shape), dtype=self.meta.stored_dtype)
            self._rows.copy(log, rows, np.arange(len(rows)), packed)
            out[torch.from_numpy(in_out)] = unpack_rows(packed)
        else:
            self._rows.copy(log, rows, in_out, out)

    def _refuse_misfit(self, out: torch.Tensor) -> None:
        right = out.dtype is self.meta.torch_dtype and out.shape[1:] == self.meta.row_shape
        if not (right and out.is_contiguous() and out.device.type == "cpu"):
            raise ValueError(
                f"out is {out.dtype} {list(out.shape)} on {out.device}, where the states of {self._folder} want a "
                f"contiguous {self.meta.torch_dtype} [tokens, {', '.join(map(str, self.meta.row_shape))}] on the CPU"
            )

    def tags(self) -> set[str]:
        """The tags that records have."""
        return {tag for (tag,) in self.index.execute("SELECT DISTINCT tag FROM records WHERE tag IS NOT NULL")}

    def complete_numbers(self) -> list[int]:
        """The numbers of the complete records."""
        return [id_ - 1 for (id_,) in self.index.execute("SELECT id FROM records WHERE complete ORDER BY id")]

    def check(self, number: int) -> Damage | None:
        """Read record `number` from disk again and compare it with its checksum. None if it is whole."""
        request_id, token_ids, record = self._fetch(number, "request_id, token_ids, id")
        rows: list[str] = []
        problem = None
        for log, blob, checksum in self.index.read_parts(record):
            part = self._learn(RecordPart(log, unpack_extents(blob)))
            rows += self._name_rows(part)
            problem = problem or self._find_problem(part, token_ids, checksum)
        return Damage(number, request_id, tuple(rows), problem) if problem else None

    def _find_problem(self, part: RecordPart, token_ids: bytes, checksum: bytes) -> str | None:
        meta = self._rows.meta(part.log)
        try:
            found = self._compute_checksum(
                token_ids, part.extents, meta.row_bytes, lambda start, out: self._rows.read_into(part.log, start, out)
            )
        except StoreError as error:
            return str(error)
        return None if found == checksum else f"checksum {checksum.hex()} expected, {found.hex()} found"

    def verify(self) -> Iterator[Damage]:
        """Every record that does not match its checksum, or whose rows cannot be read."""
        for number in range(len(self)):
            damage = self.check(number)
            if damage is not None:
                yield damage

    def close(self) -> None:
        """Close the index. Tensors that were read stay valid."""
        self._index.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return Store, (self._folder,)

    @property
    def _columns(self) -> str:
        return f"{COLUMNS}, {self.index.first_position}"

    def _fetch(self, number: int, columns: str) -> tuple[Any, ...]:
        at = number if number >= 0 else number + len(self)
        there = 0 <= at < LARGEST_ID
        found = self.index.execute(f"SELECT {columns} FROM records WHERE id = ?", (at + 1,)) if there else []
        if not found:
            raise IndexError(f"record {number} of {self._folder}, which has {len(self)}")
        return found[0]

    def _make_record(self, row: tuple[Any, ...]) -> Record:
        (
            record, request_id, num_prompt_tokens, complete, finish_reason, tag, loss_mask, token_ids, log, extents,
            first_position,
        ) = row  # fmt: skip
        parts = [(log, extents), *self.index.read_further_parts(record)]
        return Record(
            request_id=request_id,
            token_ids=torch.from_numpy(np.frombuffer(token_ids, dtype="<i8").astype(np.int64)),
            num_prompt_tokens=num_prompt_tokens,
            loss_mask=None if loss_mask is None else torch.from_numpy(np.frombuffer(loss_mask, dtype=np.bool_).copy()),
            complete=bool(complete),
            finish_reason=finish_reason,
            tag=tag,
            first_position=first_position,
            _layer_ids=self.layer_ids,
            _parts=tuple(self._learn(RecordPart(log, unpack_extents(blob))) for log, blob in parts),
            _rows=self._rows,
        )

    def _learn(self, part: RecordPart) -> RecordPart:
        stored = part.extents[part.extents[:, 0] != HOLE]
        if not self._rows.knows(part.log, int(stored.sum(axis=1).max(initial=0))):
            self._rows.learn(part.log, self.index)
        return part

    def _name_rows(self, part: RecordPart) -> list[str]:
        extents = [(start, count) for start, count in part.extents.tolist() if start != HOLE]
        try:
            return [
                f"{piece.file} {piece.first}..{piece.first + piece.count - 1}"
                for start, count in extents
                for piece in self._rows.split(part.log, start, count)
            ]
        except StoreError:  # they are in no file, which is the record's problem
            return [f"log {part.log} {start}..{start + count - 1}" for start, count in extents]


def _refuse_place(number: int, place: slice, tokens: int, room: int) -> None:
    right = 0 <= place.start < place.stop <= room and place.step in (None, 1)
    if not right or place.stop - place.start > tokens:
        raise ValueError(
            f"record {number} has {tokens} tokens, and {place} of out, which has {room}, is no place for it"
        )
