"""The writing side: rows as they come, records when their requests finish."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from types import TracebackType

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_overlay.store import lanes
from vllm_overlay.store.checksum import Hashes, checksum_hashes, split_hashing
from vllm_overlay.store.errors import StoreError, naming_path
from vllm_overlay.store.extents import Extents, find_extents_of_each, pack_extents
from vllm_overlay.store.index import Index, prepare_folder
from vllm_overlay.store.log import MOST_OPEN, LogLock, RowLog, lock_store, name_lock
from vllm_overlay.store.meta import StoreMeta
from vllm_overlay.store.parts import RECORD_COLUMNS, Part, insert_part
from vllm_overlay.store.recovery import recover_logs
from vllm_overlay.store.row_hashes import RowHashes

# Several files take an append's pieces at the same time, one file takes them one after the other. What files of 64 and
# of 128 MiB took on a GPU's host is in tests/gpu/results/2026-11-30-h200.json; tools/append_cost.py measures it.
DEFAULT_SHARD_BYTES = 64 << 20

INSERT_RECORD = f"INSERT INTO records ({RECORD_COLUMNS}) VALUES ({', '.join('?' * 13)})"


@dataclass(frozen=True)
class PendingRecord:
    """A finished request, about to be a record.

    token_ids: int64 [T]. rows: int64 [T], the row of each position in the writer's own log, -1 where there is none.
    complete: no -1 in rows. loss_mask: bool [T] or None if it is not known. num_prompt_tokens: of the T tokens, those
    that were given and not generated. number: which record of its engine's it is, the same in every pipeline stage.
    first_position: the place of the first token in its request; 0 unless the record is a window of it.
    """

    request_id: str
    token_ids: NDArray[np.int64]
    rows: NDArray[np.int64]
    num_prompt_tokens: int
    complete: bool
    finish_reason: str
    tag: str | None
    loss_mask: NDArray[np.bool_] | None
    number: int = 0
    first_position: int = 0


class StoreWriter:
    """One log of a store, open for writing. Several threads may use it; several writers, in several processes, may
    share a store.

    Make one with `StoreWriter.open`. As a context manager it closes itself.
    """

    def __init__(self, index: Index, meta: StoreMeta, log: int, rows: RowLog, part: Part | None) -> None:
        self.meta = meta
        self._part = part
        self._index = index
        self._log = log
        self._rows = rows
        self._hashes = RowHashes(meta.row_bytes)
        self._lanes = lanes.Lanes(min(lanes.MOST_LANES, os.cpu_count() or 1))
        self._lock = threading.Lock()
        self._closed = False
        self._shards_in_index = 0
        # After a failed sync the kernel may hold pages that will never reach the disk, and a second sync says nothing:
        # no more records then.
        self._lost: BaseException | None = None

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        meta: StoreMeta,
        rows_per_shard: int | None = None,
        part: Part | None = None,
    ) -> StoreWriter:
        """Create the store in folder `path`, or add to it. A shard holds `rows_per_shard` rows, or about 64 MiB.

        With a `part`, this writer's rows hold its columns of the layers in `meta` only, and its `meta` says so.

        Logs of writers that died are taken over; what they lose is said in one warning each. Raises StoreError if the
        folder cannot be written, is something else than a store, or holds rows of other layers, another size, dtype or
        target.
        """
        if rows_per_shard is not None and rows_per_shard < 1:
            raise StoreError(f"a shard holds at least one row, not {rows_per_shard}")
        folder = Path(path)
        prepare_folder(folder)
        with lock_store(folder):
            index = Index.open_for_writing(folder, meta)
            try:
                recover_logs(folder, index)
                log, lock = _start_log(folder, index, part)
            except BaseException:
                index.close()
                raise
        own = meta if part is None else meta.narrow(part.columns)
        rows = RowLog(folder, log, own, rows_per_shard or max(1, DEFAULT_SHARD_BYTES // own.row_bytes), lock)
        return cls(index, own, log, rows, part)

    @property
    def log(self) -> int:
        """The number of this writer's log in the store."""
        return self._log

    @property
    def num_rows(self) -> int:
        """Rows appended so far."""
        return self._rows.rows

    def append(self, rows: torch.Tensor) -> int:
        """Write rows `[n, layers, hidden]` (CPU, contiguous, the store's dtype) and return the row number of the first.

        A store in float8 takes them packed, uint8 `[n, layers, hidden + 4]`, as `pack_rows` makes them. Raises
        StoreError if they are of another shape or dtype, or cannot be written; the log is as before then.
        """
        shape, dtype = self.meta.stored_shape, self.meta.stored_dtype
        if rows.dim() != 3 or tuple(rows.shape[1:]) != shape or rows.dtype != dtype:
            wanted = f"[n, {shape[0]}, {shape[1]}] of {dtype}{', as pack_rows makes them' * self.meta.is_packed}"
            raise StoreError(f"this store takes rows {wanted}, not {list(rows.shape)} of {rows.dtype}")
        if rows.device.type != "cpu" or not rows.is_contiguous():
            raise StoreError(f"rows must be contiguous on the CPU, not on {rows.device} with strides {rows.stride()}")
        data = _view_bytes(rows)
        with self._lock:
            self._check_open()
            if self._rows.num_open > MOST_OPEN or self._rows.has_failed_sync:
                self._sync()
            writes = self._rows.split_append(data)
            done = self._lanes.run([*writes, *split_hashing(data, self.meta.row_bytes)])
            first = self._rows.end_append(len(rows))
            self._hashes.put(first, np.concatenate([np.empty(0, dtype=np.uint64), *done[len(writes) :]]))
        return first

    def read_rows(self, start: int, count: int) -> torch.Tensor:
        """Rows of this log as they were appended, a copy. Raises StoreError if they were not all appended."""
        rows = torch.empty((count, *self.meta.stored_shape), dtype=self.meta.stored_dtype)
        with self._lock:
            self._check_open()
            self._rows.read(start, _view_bytes(rows))
        return rows

    def commit(self, records: Sequence[PendingRecord]) -> None:
        """Make the records exist: put the log's rows on disk, then write all of the records in one transaction.

        Raises StoreError if a record contradicts itself or cannot be written; none of them exists then.
        """
        with self._lock:
            self._check_open()
            for record in records:
                check_record(record)
            packed = self._pack_all(records)
            self._sync()
            with self._index.transaction():
                self._index.write_shards(self._log, self._rows.shards[self._shards_in_index :])
                self._index.execute("UPDATE logs SET rows = ? WHERE id = ?", (self._rows.rows, self._log))
                self._insert(records, packed)
            self._shards_in_index = len(self._rows.shards)

    def _insert(self, records: Sequence[PendingRecord], values: Sequence[tuple[object, ...]]) -> None:
        if self._part is None:
            self._index.execute_many(INSERT_RECORD, values)
            return
        for record, row in zip(records, values, strict=True):
            insert_part(self._index.execute, self._part, record.number, row)

    def close(self) -> None:
        """Finish the log; a second call does nothing. Raises StoreError if rows cannot be put on disk."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            # A log that lost rows stays as after a crash, for the next writer to take over.
            try:
                # First: an append that a signal interrupted has left writes to files that are closed next.
                self._lanes.stop()
                if self._lost is None:
                    self._finish()
            finally:
                try:
                    self._rows.release()
                finally:
                    self._index.close()

    def _finish(self) -> None:
        folder = self._index.path.parent
        with lock_store(folder):
            self._rows.finish()
            with self._index.transaction():
                # From the last one on that is known: those before it may have been retired.
                first = max(0, min(self._shards_in_index, len(self._rows.shards)) - 1)
                self._index.execute("DELETE FROM shards WHERE log = ? AND number >= ?", (self._log, first))
                self._index.write_shards(self._log, self._rows.shards[first:])
                self._index.execute(
                    "UPDATE logs SET rows = ?, closed = ?, clean = 1 WHERE id = ?",
                    (self._rows.rows, time.time(), self._log),
                )
            with naming_path("remove", folder / name_lock(self._log)):
                (folder / name_lock(self._log)).unlink()
            self._index.leave_wal()

    def __enter__(self) -> StoreWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise StoreError(f"the writer of {self._index.path.parent} is closed")

    def _sync(self) -> None:
        if self._lost is not None:
            raise StoreError(f"rows may be lost, no further record is written: {self._lost}") from self._lost
        try:
            self._rows.sync()
        except BaseException as error:  # a signal's too: what failed meanwhile would be heard of by nobody
            self._lost = error
            raise

    def _pack_all(self, records: Sequence[PendingRecord]) -> list[tuple[object, ...]]:
        """The values of each record. numpy is called once for all of them: a server may end hundreds at once."""
        if not records:
            return []
        lengths = [len(record.rows) for record in records]
        starts = [0, *accumulate(lengths[:-1])]
        rows = np.concatenate([record.rows for record in records])
        lowest, highest = np.minimum.reduceat(rows, starts), np.maximum.reduceat(rows, starts)
        missing = np.add.reduceat(rows < 0, starts, dtype=np.int64)
        for record, *facts in zip(records, lowest.tolist(), highest.tolist(), missing.tolist(), strict=True):
            self._check_rows(record, *facts)
        extents = find_extents_of_each(rows, starts)
        hashes = np.split(
            self._hashes.find(rows[rows >= 0], self._rows.read), np.cumsum(np.subtract(lengths, missing))[:-1]
        )
        return [self._pack(*each) for each in zip(records, extents, hashes, strict=True)]

    def _check_rows(self, record: PendingRecord, lowest: int, highest: int, missing: int) -> None:
        name = f"record {record.request_id!r}"
        if lowest < -1 or highest >= self._rows.rows:
            raise StoreError(f"{name}: rows {lowest}..{highest}, and this log has {self._rows.rows}")
        if record.complete != (missing == 0):
            said = "complete" if record.complete else "incomplete"
            raise StoreError(f"{name}: said to be {said}, and {missing} of {len(record.rows)} rows are missing")

    def _pack(self, record: PendingRecord, extents: Extents, hashes: Hashes) -> tuple[object, ...]:
        """The values of the record's row in the index, in the order of RECORD_COLUMNS."""
        token_ids = record.token_ids.astype("<i8").tobytes()
        return (
            self._log,
            record.request_id,
            record.first_position,
            len(record.token_ids),
            record.num_prompt_tokens,
            int(record.complete),
            record.finish_reason,
            record.tag,
            checksum_hashes(token_ids, hashes),
            time.time(),
            pack_extents(extents),
            None if record.loss_mask is None else record.loss_mask.tobytes(),
            token_ids,
        )


def check_record(record: PendingRecord) -> None:
    """Raises StoreError if what the record says of its tokens contradicts itself."""
    ids, rows, mask = record.token_ids, record.rows, record.loss_mask
    name, tokens = f"record {record.request_id!r}", len(ids)
    if ids.dtype != np.int64 or rows.dtype != np.int64:
        raise StoreError(f"{name}: token ids and rows must be int64, not {ids.dtype} and {rows.dtype}")
    if not tokens or ids.ndim != 1 or rows.shape != (tokens,):
        raise StoreError(f"{name}: token ids {list(ids.shape)} and rows {list(rows.shape)} are not one row a token")
    if mask is not None and (mask.shape != (tokens,) or mask.dtype != np.bool_):
        raise StoreError(f"{name}: the loss mask must be bool [{tokens}], not {mask.dtype} {list(mask.shape)}")
    if not 0 <= record.num_prompt_tokens <= tokens:
        raise StoreError(f"{name}: {record.num_prompt_tokens} prompt tokens, of {tokens} tokens")
    if record.first_position < 0:
        raise StoreError(f"{name}: it begins at position {record.first_position}, and positions begin at 0")


def _start_log(folder: Path, index: Index, part: Part | None) -> tuple[int, LogLock]:
    """A new log and its lock, which is held before others can see the log: they cannot take its writer for dead."""
    with ExitStack() as undo:
        with index.transaction():
            of_part = (None, None) if part is None else (part.session, json.dumps(part.columns))
            index.execute(
                "INSERT INTO logs (started, pid, session, columns) VALUES (?, ?, ?, ?)",
                (time.time(), os.getpid(), *of_part),
            )
            log = int(index.execute("SELECT max(id) FROM logs")[0][0])
            lock = LogLock.create(folder / name_lock(log))
            undo.callback(lock.release)
        undo.pop_all()
    return log, lock


def _view_bytes(rows: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor: numpy has no bfloat16, so it goes through bytes."""
    return memoryview(rows.detach().reshape(-1).view(torch.uint8).numpy().data)
