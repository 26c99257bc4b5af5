"""A log: the rows of one writer, numbered from 0 in the order they came, and the lock that tells if it lives."""

from __future__ import annotations

import fcntl
import functools
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from vllm_overlay.store.errors import StoreError, naming_path
from vllm_overlay.store.lanes import Lanes
from vllm_overlay.store.meta import StoreMeta
from vllm_overlay.store.shard import Shard, shrink_shard, sync_folder, write_fully

SHARDS_FOLDER = "shards"

COUNT_DIGITS = 20

# Full shards are put on disk while others are written, so many at a time: a kernel that has the memory waits with rows
# until somebody asks for them, and at the end of a run they would all be waited for.
SYNC_LANES = 4

# Shards that wait for a commit, 8 GiB: a process may open 1,024 files unless it is told otherwise.
MOST_OPEN = 128


def name_shard(log: int, number: int) -> str:
    """File name relative to the store's folder."""
    return f"{SHARDS_FOLDER}/{log:04d}-{number:05d}.safetensors"


def name_lock(log: int) -> str:
    return f"{SHARDS_FOLDER}/{log:04d}.lock"


@dataclass(frozen=True)
class ShardRows:
    """Which rows of its log a shard holds: `rows` of them from `first_row` on. `file` is relative to the store."""

    number: int
    file: str
    first_row: int
    rows: int


class LogLock:
    """A file that the writer of a log holds with flock(2) and keeps the number of its rows in.

    The kernel drops the lock when the last process that has the file open ends, however it ends: whoever can take the
    lock knows that the writer is dead. The number reaches the page cache with every append and thus survives a killed
    process, though not a power cut.
    """

    def __init__(self, path: Path, fd: int) -> None:
        self.path = path
        self._fd = fd

    @classmethod
    def create(cls, path: Path) -> LogLock:
        with naming_path("lock", path):
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o666)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os.close(fd)
                raise
        return cls(path, fd)

    @classmethod
    def take_over(cls, path: Path) -> LogLock | None:
        """The lock of a writer that is dead, or None if its writer lives. Raises StoreError if the file is missing."""
        with naming_path("open", path):
            fd = os.open(path, os.O_RDWR)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(fd)
                return None
            except OSError:
                os.close(fd)
                raise
        return cls(path, fd)

    def write_count(self, rows: int) -> None:
        write_fully(self._fd, memoryview(f"{rows:0{COUNT_DIGITS}d}\n".encode()), 0, self.path)

    def read_count(self) -> int:
        with naming_path("read", self.path):
            text = os.pread(self._fd, COUNT_DIGITS, 0)
        # Empty if the writer died before its first row.
        return int(text or b"0")

    def release(self) -> None:
        os.close(self._fd)


@contextmanager
def lock_store(folder: Path) -> Iterator[None]:
    """One writer at a time opens or closes: the index is made, dead logs taken over and log numbers given out once."""
    path = folder / "store.lock"
    with naming_path("lock", path):
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        with naming_path("lock", path):
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


class RowLog:
    """The rows of one writer. Data are plain bytes of whole rows. Not safe to use from several threads at once."""

    def __init__(self, folder: Path, log: int, meta: StoreMeta, rows_per_shard: int, lock: LogLock) -> None:
        self.rows = 0
        self.shards: list[ShardRows] = []
        self._folder = folder
        self._log = log
        self._meta = meta
        self._rows_per_shard = rows_per_shard
        self._lock = lock
        # Files stay open until a commit has synced them and they take no more rows: a long run makes more shards than a
        # process may open files.
        self._open: dict[int, Shard] = {}
        self._dirty: set[int] = set()
        self._has_new_names = False
        self._lanes = Lanes(SYNC_LANES)
        # Of full shards, which take no more rows.
        self._syncs: dict[int, Future[None]] = {}

    def split_append(self, data: memoryview) -> list[Callable[[], None]]:
        """Calls that write the rows, one for each shard; in any order, or at the same time. Raises StoreError, and so
        do the calls. Until `end_append` the log is as before."""
        writes: list[Callable[[], None]] = []
        row = self.rows
        while data:
            number, offset = divmod(row, self._rows_per_shard)
            count = min(self._rows_per_shard - offset, len(data) // self._meta.row_bytes)
            shard, size = self._shard_to_write(number), count * self._meta.row_bytes
            writes.append(functools.partial(shard.write, offset, data[:size]))
            data = data[size:]
            row += count
        return writes

    def end_append(self, count: int) -> int:
        """The calls have written `count` rows: take them in, and return the number of the first. Raises StoreError."""
        first = self.rows
        self._lock.write_count(first + count)
        self.rows += count
        for number in [number for number in self._dirty if self._is_full(number) and number not in self._syncs]:
            self._syncs[number] = self._lanes.start(self._open[number].sync)
        return first

    def _is_full(self, number: int) -> bool:
        return number < self.rows // self._rows_per_shard

    def _shard_to_write(self, number: int) -> Shard:
        if number == len(self.shards):
            file = name_shard(self._log, number)
            self._open[number] = Shard.create(self._folder / file, self._meta, self._rows_per_shard)
            self._has_new_names = True
            self.shards.append(ShardRows(number, file, number * self._rows_per_shard, self._rows_per_shard))
        self._dirty.add(number)
        return self._open[number]

    def read(self, start: int, out: memoryview) -> None:
        """Fill `out` with rows from `start` on. Raises StoreError if they were not all written."""
        count = len(out) // self._meta.row_bytes
        if start < 0 or start + count > self.rows:
            raise StoreError(f"rows {start}..{start + count - 1} were asked for, and this log has {self.rows}")
        while out:
            number, offset = divmod(start, self._rows_per_shard)
            count = min(self._rows_per_shard - offset, len(out) // self._meta.row_bytes)
            with self._shard_to_read(number) as shard:
                shard.read(offset, out[: count * self._meta.row_bytes])
            out = out[count * self._meta.row_bytes :]
            start += count

    @contextmanager
    def _shard_to_read(self, number: int) -> Iterator[Shard]:
        if number in self._open:
            yield self._open[number]
            return
        shard = Shard.open(self._folder / self.shards[number].file, self._meta)
        try:
            yield shard
        finally:
            shard.close()

    @property
    def num_open(self) -> int:
        """Shards that are open to be written."""
        return len(self._open)

    @property
    def has_failed_sync(self) -> bool:
        """Whether a full shard could not be put on disk; `sync` raises what went wrong."""
        return any(each.done() and each.exception() is not None for each in self._syncs.values())

    def sync(self) -> None:
        """Put every row on disk. Raises StoreError."""
        if self._has_new_names:
            sync_folder(self._folder / SHARDS_FOLDER)
            self._has_new_names = False
        rest = [self._lanes.start(self._open[number].sync) for number in sorted(self._dirty - self._syncs.keys())]
        started = [*self._syncs.values(), *rest]
        wait(started)
        for each in started:
            each.result()
        self._dirty.clear()
        self._syncs.clear()
        for number in [number for number in self._open if self._is_full(number)]:
            self._open.pop(number).close()

    def finish(self) -> None:
        """Put every row on disk and cut what was set aside for rows that did not come. Raises StoreError."""
        self.sync()
        # An append that failed may have left a shard that no row came into.
        while self.shards and self.shards[-1].first_row >= self.rows:
            empty = self.shards.pop()
            self._open.pop(empty.number).close()
            with naming_path("remove", self._folder / empty.file):
                (self._folder / empty.file).unlink()
        if not self.shards:
            return
        last = self.shards[-1]
        rows = self.rows - last.first_row
        if rows < last.rows:
            shrink_shard(self._folder / last.file, self._meta, rows)
            self.shards[-1] = ShardRows(last.number, last.file, last.first_row, rows)

    def release(self) -> None:
        """Close the files, on which nothing is under way then, and let go of the lock."""
        try:
            self._lanes.stop()
            for shard in self._open.values():
                shard.close()
            self._open.clear()
        finally:
            self._lock.release()
