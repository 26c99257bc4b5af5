"""Rows of a live store that nobody needs any more: their shards are removed, oldest use first, while writers go on.

A record of removed rows stays, with its tokens, as an incomplete one whose positions are missing; so every reader finds
the store whole. The index says so first, in one transaction, and the files go after it: a crash between the two leaves
files that no index names, which the next `Retirer` removes.

What may be removed is for the caller to say, by the number of the last record that it is done with. Two kinds of rows
are needed later all the same, and only the engine knows them: those of requests that are still running, and those that
its prefix cache refers to. Both were written or used last not long ago, so the bytes to keep should be several times
what the engine's KV cache holds in rows. A record that comes for rows that are gone is marked incomplete too.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from vllm_overlay.store.checksum import COMPUTE_CHECKSUM
from vllm_overlay.store.errors import StoreError, naming_path
from vllm_overlay.store.extents import HOLE, Extents, find_extents, pack_extents, unpack_extents
from vllm_overlay.store.index import SCHEMA_VERSION, Index
from vllm_overlay.store.log import SHARDS_FOLDER, ShardRows, name_shard
from vllm_overlay.store.shard import Shard, sync_folder

Key = tuple[int, int]  # a shard: its log, and its number in it
GONE = -1  # the number of the shard of a row that is in none


@dataclass(frozen=True)
class Retired:
    """What one call removed."""

    files: int
    bytes: int


class Retirer:
    """Removes shards of the store in one folder; it writes nowhere else. One at a time for a store."""

    def __init__(self, folder: Path) -> None:
        """Raises StoreError: no store, one of another schema, or one of pipeline stages, whose records have several
        parts."""
        Index.open_for_reading(folder).close()
        self._folder = folder
        self._index = Index(folder, "rw")
        try:
            self._index.execute("PRAGMA synchronous=FULL")
            self._meta = self._index.read_meta()
            self._refuse_others()
            self._shards: dict[int, list[ShardRows]] = {}
            self._users: dict[Key, set[int]] = defaultdict(set)
            self._seen = 0
            self._remove_unnamed()
        except BaseException:
            self._index.close()
            raise

    def _refuse_others(self) -> None:
        if self._index.version != SCHEMA_VERSION:
            raise StoreError(
                f"{self._folder} was written in version {self._index.version} of the store's schema; rows are removed "
                f"from stores of version {SCHEMA_VERSION} only"
            )
        if self._index.execute("SELECT 1 FROM logs WHERE columns IS NOT NULL LIMIT 1"):
            raise StoreError(
                f"{self._folder} is written by pipeline stages: rows cannot be removed from it while it is"
            )

    def update(self) -> int:
        """Take note of what was committed since, and mark the records among it whose rows are gone. Returns the number
        of records there are: each of these can be read, or is incomplete."""
        found = self._index.execute("SELECT id, log, extents FROM records WHERE id > ? ORDER BY id", (self._seen,))
        for (log,) in self._index.execute("SELECT id FROM logs"):
            self._shards[log] = self._index.read_shards(log)
        broken = []
        for record, log, blob in found:
            rows = expand(unpack_extents(blob))
            numbers = self._locate(log, rows[rows != HOLE])
            for number in np.unique(numbers[numbers != GONE]).tolist():
                self._users[log, number].add(record)
            if (numbers == GONE).any():
                broken.append(record)
        if broken:
            with self._index.transaction():
                self._mark_incomplete(broken)
        self._seen = found[-1][0] if found else self._seen
        return self._seen

    def _locate(self, log: int, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """The number of the shard of each row, or GONE."""
        shards = self._shards[log]
        if not shards:
            return np.full(len(rows), GONE)
        numbers, first, count = (
            np.array([getattr(shard, fact) for shard in shards]) for fact in ("number", "first_row", "rows")
        )
        at = np.searchsorted(first, rows, side="right") - 1
        held = (at >= 0) & (rows < (first + count)[at])
        return np.where(held, numbers[at], GONE)

    def retire(self, done: int, keep_bytes: int) -> Retired:
        """Remove shards until all take `keep_bytes` at most, or none is left of which only records 1..`done` have rows.

        A shard that its writer may still write to is not removed. Raises StoreError.
        """
        self.update()
        sizes = {
            (log, shard.number): shard.rows * self._meta.row_bytes
            for log, shards in self._shards.items()
            for shard in shards
        }
        excess, chosen = sum(sizes.values()) - keep_bytes, []
        for key in self._list_oldest(done):
            if excess <= 0:
                break
            chosen.append(key)
            excess -= sizes[key]
        if chosen:
            self._remove(chosen)
        return Retired(len(chosen), sum(sizes[key] for key in chosen))

    def _list_oldest(self, done: int) -> list[Key]:
        """Those that may go, by the last record that has rows in them. One that no record has rows in may hold those of
        requests that run: it stays as long as the one before it, and the first one as long as record 1."""
        open_logs = {log for (log,) in self._index.execute("SELECT id FROM logs WHERE closed IS NULL")}
        ages: list[tuple[int, Key]] = []
        for log, shards in self._shards.items():
            before = 1
            for shard in shards[:-1] if log in open_logs else shards:
                key = log, shard.number
                before = max(self._users[key], default=before)
                ages.append((before, key))
        return [key for age, key in sorted(ages) if age <= done]

    def _remove(self, chosen: Sequence[Key]) -> None:
        users = sorted(set().union(*(self._users[key] for key in chosen)))
        for log, number in chosen:
            self._shards[log] = [shard for shard in self._shards[log] if shard.number != number]
        with self._index.transaction():
            self._mark_incomplete(users)
            self._index.execute_many("DELETE FROM shards WHERE log = ? AND number = ?", chosen)
        for key in chosen:
            del self._users[key]
            self._unlink(self._folder / name_shard(*key))
        sync_folder(self._folder / SHARDS_FOLDER)

    def _mark_incomplete(self, records: Sequence[int]) -> None:
        """Inside a transaction: leave of these records the rows that are still there, with a checksum of them as they
        are on disk."""
        for record in records:
            log, blob, token_ids = self._index.execute(
                "SELECT log, extents, token_ids FROM records WHERE id = ?", (record,)
            )[0]
            rows = expand(unpack_extents(blob))
            there = rows != HOLE
            there[there] = self._locate(log, rows[there]) != GONE
            extents = find_extents(np.where(there, rows, HOLE))
            checksum = COMPUTE_CHECKSUM[self._index.version](
                token_ids, extents, self._meta.row_bytes, functools.partial(self._read, log)
            )
            self._index.execute(
                "UPDATE records SET complete = 0, extents = ?, checksum = ? WHERE id = ?",
                (pack_extents(extents), checksum, record),
            )

    def _read(self, log: int, start: int, out: memoryview) -> None:
        while out:
            number = int(self._locate(log, np.array([start]))[0])
            held = next(shard for shard in self._shards[log] if shard.number == number)
            count = min(held.first_row + held.rows - start, len(out) // self._meta.row_bytes)
            shard = Shard.open(self._folder / name_shard(log, number), self._meta)
            try:
                shard.read(start - held.first_row, out[: count * self._meta.row_bytes])
            finally:
                shard.close()
            start, out = start + count, out[count * self._meta.row_bytes :]

    def _unlink(self, path: Path) -> None:
        with naming_path("remove", path):
            path.unlink(missing_ok=True)

    def _remove_unnamed(self) -> None:
        """Files that a crash left after the index had forgotten them. A writer makes a shard before it is in the index,
        but never one before the last that is there; of a log that is closed, nobody makes one."""
        for log, closed in self._index.execute("SELECT id, closed IS NOT NULL FROM logs"):
            shards = self._index.read_shards(log)
            files = {name_shard(log, number) for number in range(shards[-1].number if shards else 0)}
            if closed:
                found = (self._folder / SHARDS_FOLDER).glob(f"{log:04d}-*.safetensors")
                files = {f"{SHARDS_FOLDER}/{path.name}" for path in found}
            for file in files - {shard.file for shard in shards}:
                self._unlink(self._folder / file)

    def close(self) -> None:
        self._index.close()


def expand(extents: Extents) -> NDArray[np.int64]:
    """The row of each position, HOLE where it has none: the inverse of `find_extents`."""
    pieces = [np.full(n, HOLE) if start == HOLE else np.arange(start, start + n) for start, n in extents.tolist()]
    return np.concatenate([np.empty(0, dtype=np.int64), *pieces])
