"""What the next writer does about logs whose writer died: say what is lost, free its space, close it."""

from __future__ import annotations

import logging
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from vllm_overlay.store.errors import naming_path
from vllm_overlay.store.extents import merge_extents
from vllm_overlay.store.index import Index
from vllm_overlay.store.log import SHARDS_FOLDER, LogLock, ShardRows, name_lock
from vllm_overlay.store.meta import StoreMeta
from vllm_overlay.store.parts import drop_widowed_parts
from vllm_overlay.store.shard import shrink_shard

logger = logging.getLogger("vllm_overlay.store")


@dataclass(frozen=True)
class DeadLog:
    """A log that was not closed, whose writer is gone, and whose lock we hold."""

    log: int
    pid: int
    lock: LogLock


def recover_logs(folder: Path, index: Index) -> None:
    """Take over each log that was not closed and whose writer is proven dead. The caller holds the store's lock.

    Raises StoreError if a file that records refer to is missing or short. Can be repeated if it is interrupted.
    """
    with ExitStack() as held:
        dead = _take_over_dead_logs(folder, index, held)
        # First: what waits after this, waits for a stage that lives, and its rows are kept.
        with index.transaction():
            drop_widowed_parts(index.execute, [each.log for each in dead])
        for each in dead:
            _recover_log(folder, index, each)
    _remove_stale_locks(folder, index)


def _take_over_dead_logs(folder: Path, index: Index, held: ExitStack) -> list[DeadLog]:
    dead = []
    for log, pid in index.execute("SELECT id, pid FROM logs WHERE closed IS NULL ORDER BY id"):
        path = folder / name_lock(log)
        if not path.exists():
            logger.warning(
                "log %d of %s was not closed, and without %s nobody can tell if process %d still writes it: left alone",
                log,
                folder,
                path.name,
                pid,
            )
            continue
        lock = LogLock.take_over(path)
        if lock is not None:
            held.callback(lock.release)
            dead.append(DeadLog(log, pid, lock))
    return dead


def _remove_stale_locks(folder: Path, index: Index) -> None:
    """Those of logs that are closed, or never began, left by writers that died before they could remove them."""
    open_logs = {name_lock(log) for (log,) in index.execute("SELECT id FROM logs WHERE closed IS NULL")}
    for path in (folder / SHARDS_FOLDER).glob("*.lock"):
        if f"{SHARDS_FOLDER}/{path.name}" not in open_logs:
            with naming_path("remove", path):
                path.unlink()


def _recover_log(folder: Path, index: Index, dead: DeadLog) -> None:
    log, lock = dead.log, dead.lock
    kept = merge_extents([*index.read_extents(log), *index.read_waiting_extents(log)])
    end = int(kept[-1].sum()) if len(kept) else 0
    # After a power cut the count may be older than the records.
    written = max(lock.read_count(), end)
    known = index.read_shards(log)
    # All but the last are full, and the last is never retired.
    retired = known[-1].first_row - sum(shard.rows for shard in known[:-1]) if known else 0
    dropped = written - retired - int(kept[:, 1].sum())
    shards = _trim_shards(folder, index.read_log_meta(log), log, known, end)
    with index.transaction():
        index.execute("DELETE FROM shards WHERE log = ?", (log,))
        index.write_shards(log, shards)
        index.execute(
            "UPDATE logs SET rows = ?, closed = ?, clean = 0, dropped = ? WHERE id = ?",
            (end, time.time(), dropped, log),
        )
    with naming_path("remove", lock.path):
        lock.path.unlink()
    logger.warning(
        "log %d of %s was not closed cleanly (process %d is gone): %d of its %d rows are in no record and were dropped",
        log,
        folder,
        dead.pid,
        dropped,
        written,
    )


def _trim_shards(folder: Path, meta: StoreMeta, log: int, shards: list[ShardRows], end: int) -> list[ShardRows]:
    """Cut everything of the log after row `end` - 1. Returns the shards that are left."""
    left = []
    for shard in shards:
        rows = min(shard.rows, end - shard.first_row)
        if rows > 0:
            left.append(ShardRows(shard.number, shard.file, shard.first_row, rows))
    names = {shard.file for shard in left}
    # Not only the shards that the index knows: it learns of one when a record is committed.
    for path in (folder / SHARDS_FOLDER).glob(f"{log:04d}-*"):
        if f"{SHARDS_FOLDER}/{path.name}" not in names:
            with naming_path("remove", path):
                path.unlink()
    for shard in left:
        shrink_shard(folder / shard.file, meta, shard.rows)
    return left
