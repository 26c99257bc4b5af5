"""A new store with records of other stores: all of several, which merges them, or some.

A shard of which every row is kept is the same file under another name (a hard link; on another filesystem a copy), and
of others the kept rows alone are written. Nobody writes to the shards of a log that is closed, so that stores can share
them; those of a log whose writer may be at work are always copied.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from vllm_overlay.store.errors import StoreError, naming_path
from vllm_overlay.store.extents import HOLE, Extents, find_extents, pack_extents, unpack_extents
from vllm_overlay.store.files import LocalFiles, Piece, StoreFiles
from vllm_overlay.store.index import Index, prepare_folder
from vllm_overlay.store.log import SHARDS_FOLDER, ShardRows, name_shard
from vllm_overlay.store.meta import StoreMeta
from vllm_overlay.store.new_folder import new_folder, refuse_nested
from vllm_overlay.store.parts import RECORD_COLUMNS
from vllm_overlay.store.reader import Store
from vllm_overlay.store.remote import StorePath
from vllm_overlay.store.shard import Shard, read_data_start, sync_folder

OLDEST_SCHEMA = 2  # before it, checksums go over other bytes
CHUNK_BYTES = 16 << 20

# Gives the same items again and shows how far it is.
Progress = Callable[[Iterable[Any], int], Iterable[Any]]


@dataclass(frozen=True)
class Choice:
    """Which records: with one of the tags (None: any), complete ones only or all, that fraction of the requests (by
    their ids: the same ones every time), and of the records of all stores, counted through, those of the range.
    """

    tags: frozenset[str] | None = None
    complete_only: bool = False
    sample: float = 1.0
    first: int = 0
    end: int | None = None

    def includes(self, number: int, request_id: str, complete: bool, tag: str | None) -> bool:
        if number < self.first or (self.end is not None and number >= self.end):
            return False
        if (self.complete_only and not complete) or (self.tags is not None and tag not in self.tags):
            return False
        return bool(xxhash.xxh3_64_intdigest(request_id.encode()) < self.sample * 2**64)


@dataclass(frozen=True)
class Copied:
    """Records that were taken and left out; bytes of rows that are shared with the stores, and that were written."""

    records: int
    left_out: int
    shared: int
    written: int


@dataclass(frozen=True)
class ShardCopy:
    """One shard of the new store. source: of the member, relative to it. kept: bool, by row of the source."""

    files: StoreFiles[StorePath]
    source: str
    target: ShardRows
    kept: NDArray[np.bool_]
    meta: StoreMeta
    may_share: bool


@dataclass(frozen=True)
class LogCopy:
    """A log of which records are taken. new_rows: int64, by row of the old log, -1 where it is left out."""

    member: Store
    old: int
    new: int
    new_rows: NDArray[np.int64]
    shards: list[ShardCopy]


def copy_records(stores: Sequence[Store], folder: Path, choice: Choice, progress: Progress) -> Copied:
    """Make a store of the chosen records, in their order, in a new folder.

    Raises StoreError if the stores hold rows of different kinds or are too old, no record is chosen, the folder is in
    use or lies in one of the stores, or something cannot be read or written, such as a shard that is cut short.
    """
    refuse_nested(folder, [store.path for store in stores])
    members = [member for store in stores for member in store.members]
    _refuse_misfits(members)
    chosen = _choose(members, choice)
    total, taken = sum(map(len, members)), sum(map(len, chosen))
    if not taken:
        raise StoreError(f"none of the {total} records is chosen: nothing is written")
    logs: list[LogCopy] = []
    for member, records in zip(members, chosen, strict=True):
        logs += _plan_logs(member, records, len(logs) + 1)
    shards = [shard for log in logs for shard in log.shards]
    with new_folder(folder) as unfinished:
        prepare_folder(unfinished)
        shared = [_copy_shard(shard, unfinished) for shard in progress(shards, len(shards))]
        sync_folder(unfinished / SHARDS_FOLDER)
        _write_index(unfinished, members, chosen, logs)
    sizes = [shard.target.rows * shard.meta.row_bytes for shard in shards]
    kept = sum(size for size, is_shared in zip(sizes, shared, strict=True) if is_shared)
    return Copied(taken, total - taken, kept, sum(sizes) - kept)


def _refuse_misfits(members: Sequence[Store]) -> None:
    for member in members:
        if misfits := members[0].meta.misfits(member.meta):
            raise StoreError(f"{member.path} holds other rows than {members[0].path}: {'; '.join(misfits)}")
        if member.index.version < OLDEST_SCHEMA:
            raise StoreError(
                f"{member.path} was written in version 1 of the store's schema: read it, but not from here"
            )


def _choose(members: Sequence[Store], choice: Choice) -> list[list[int]]:
    """The ids of the chosen records, by member."""
    starts = [0, *accumulate(map(len, members))]
    facts = "SELECT id, request_id, complete, tag FROM records ORDER BY id"
    return [
        [record for record, *rest in member.index.execute(facts) if choice.includes(start + record - 1, *rest)]
        for start, member in zip(starts, members, strict=False)
    ]


def _plan_logs(member: Store, records: Sequence[int], first_new: int) -> list[LogCopy]:
    extents: dict[int, list[Extents]] = {}
    for record in records:
        for log, blob, _ in member.index.read_parts(record):
            extents.setdefault(log, []).append(unpack_extents(blob))
    everything = len(records) == len(member)
    return [
        _plan_log(member, old, first_new + place, extents[old], everything) for place, old in enumerate(sorted(extents))
    ]


def _plan_log(member: Store, old: int, new: int, extents: Sequence[Extents], everything: bool) -> LogCopy:
    """With everything of a member, rows in no record are kept as well: then no file of it need be written again."""
    # First: a writer that closes between the two shortens its shards, and they are copied then, not shared.
    is_closed = member.index.execute("SELECT closed IS NOT NULL FROM logs WHERE id = ?", (old,)) == [(1,)]
    shards = member.index.read_shards(old)
    there = np.zeros(max((shard.first_row + shard.rows for shard in shards), default=0), dtype=np.bool_)
    for shard in shards:  # others may have been retired
        there[shard.first_row : shard.first_row + shard.rows] = True
    kept = there & (everything and is_closed)
    for start, count in (pair for each in extents for pair in each.tolist()):
        if start != HOLE:
            if there[start : start + count].sum() < count:
                raise StoreError(f"rows {start}..{start + count - 1} of log {old} are in no shard of {member.path}")
            kept[start : start + count] = True
    meta = member.index.read_log_meta(old)
    copies: list[ShardCopy] = []
    first = 0
    for shard in shards:
        here = kept[shard.first_row : shard.first_row + shard.rows]
        rows = int(here.sum())
        if rows:
            target = ShardRows(len(copies), name_shard(new, len(copies)), first, rows)
            copies.append(ShardCopy(member.files, shard.file, target, here, meta, is_closed))
            first += rows
    return LogCopy(member, old, new, np.where(kept, np.cumsum(kept) - 1, HOLE), copies)


def _copy_shard(shard: ShardCopy, folder: Path) -> bool:
    """True if the file is shared with the source."""
    target = folder / shard.target.file
    if not isinstance(shard.files, LocalFiles) or not shard.may_share or not shard.kept.all():
        _write_rows(shard, target)
        return False
    source = shard.files.path / shard.source
    _refuse_short(shard, source)
    with naming_path("copy", source):
        try:
            os.link(source, target)
        except OSError:  # another filesystem, or one without hard links
            shutil.copyfile(source, target)
            return False
    return True


def _refuse_short(shard: ShardCopy, source: Path) -> None:
    """A file that is shared is not read: whether it has all of its rows shows in its size alone."""
    with naming_path("open", source), source.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        needed = read_data_start(file.fileno(), source) + len(shard.kept) * shard.meta.row_bytes
    if size < needed:
        raise StoreError(
            f"{source} is cut short: its records need {needed} bytes; `vllm-overlay inspect --verify` names them"
        )


def _write_rows(shard: ShardCopy, target: Path) -> None:
    row_bytes = shard.meta.row_bytes
    buffer = memoryview(bytearray(max(1, CHUNK_BYTES // row_bytes) * row_bytes))
    with closing(Shard.create(target, shard.meta, shard.target.rows)) as new:
        written = 0
        for start, count in find_extents(np.flatnonzero(shard.kept)).tolist():
            while count:
                rows = min(count, len(buffer) // row_bytes)
                piece = Piece(shard.source, start, rows)
                shard.files.read_into(piece, shard.meta, buffer[: rows * row_bytes])
                new.write(written, buffer[: rows * row_bytes])
                start, count, written = start + rows, count - rows, written + rows
        new.sync()


def _write_index(
    folder: Path, members: Sequence[Store], chosen: Sequence[Sequence[int]], logs: Sequence[LogCopy]
) -> None:
    now, pid = time.time(), os.getpid()
    with closing(Index.open_for_writing(folder, members[0].meta)) as index:
        with index.transaction():
            for log in logs:
                columns = log.member.index.execute("SELECT columns FROM logs WHERE id = ?", (log.old,))[0][0]
                index.execute(
                    "INSERT INTO logs (id, started, pid, rows, closed, clean, columns) VALUES (?, ?, ?, ?, ?, 1, ?)",
                    (log.new, now, pid, sum(shard.target.rows for shard in log.shards), now, columns),
                )
                index.write_shards(log.new, [shard.target for shard in log.shards])
            for member, records in zip(members, chosen, strict=True):
                _copy_facts(index, member, records, {log.old: log for log in logs if log.member is member})
        index.leave_wal()


def _copy_facts(index: Index, member: Store, records: Sequence[int], logs: dict[int, LogCopy]) -> None:
    columns = RECORD_COLUMNS.replace("first_position", member.index.first_position)
    names = RECORD_COLUMNS.split(", ")
    places = ", ".join("?" * len(names))

    def move(row: Sequence[Any]) -> list[Any]:
        facts = dict(zip(names, row, strict=True))
        log = logs[facts["log"]]
        extents = pack_extents(_move_extents(unpack_extents(facts["extents"]), log.new_rows))
        return list({**facts, "log": log.new, "extents": extents}.values())

    for record in records:
        row = member.index.execute(f"SELECT {columns} FROM records WHERE id = ?", (record,))[0]
        index.execute(f"INSERT INTO records ({RECORD_COLUMNS}) VALUES ({places})", move(row))
        new = index.execute("SELECT max(id) FROM records")[0][0]
        parts = member.index.execute(f"SELECT session, number, part, {columns} FROM parts WHERE record = ?", (record,))
        for session, number, part, *rest in parts:
            index.execute(
                f"INSERT INTO parts (session, number, part, record, {RECORD_COLUMNS}) VALUES (?, ?, ?, ?, {places})",
                (session, number, part, new, *move(rest)),
            )


def _move_extents(extents: Extents, new_rows: NDArray[np.int64]) -> Extents:
    rows = np.concatenate(
        [
            np.full(count, HOLE) if start == HOLE else new_rows[start : start + count]
            for start, count in extents.tolist()
        ]
    )
    return find_extents(rows)
