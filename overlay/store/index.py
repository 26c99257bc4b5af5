"""The index: one SQLite file with a row for each record, log and shard. A record exists once its row is committed."""

from __future__ import annotations

import json
import logging
import sqlite3
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any

from vllm_overlay.store.errors import StoreError, naming_path
from vllm_overlay.store.extents import Extents, unpack_extents
from vllm_overlay.store.log import SHARDS_FOLDER, ShardRows
from vllm_overlay.store.meta import StoreMeta
from vllm_overlay.store.parts import PARTS_SCHEMA

logger = logging.getLogger("vllm_overlay.store")

INDEX_FILE = "index.sqlite"
JOURNAL_MAGIC = bytes.fromhex("d9d505f920a163d7")
# 1: a record's checksum goes over its rows. 2: over the hashes of its rows (see checksum.py), and a record may have
# several parts (see parts.py). 3: a record may begin after position 0 of its request.
SCHEMA_VERSION = 3
WAIT_FOR_OTHER_WRITERS_S = 60

# records: only ever added, so that ids are 1, 2, 3, ... in the order of their commits, across all writers. The blobs
# come last: SQLite then reads the facts before them without the blobs' pages. token_ids and extents are little-endian
# int64, loss_mask is a byte a token, checksum the 8 bytes of a digest (see checksum.py); first_position is the place of
# the first token in its request. logs: `closed` is NULL until its writer, or after a crash the next one, is done with
# it; `dropped` counts the rows a crash left in no record; `columns` is NULL if its rows hold all of the store's layers,
# or else which ones, as JSON; `session` is that of the engine whose pipeline stage writes it. A record of several parts
# has its first in `records`, the others in `parts`.
SCHEMA = (
    "CREATE TABLE meta (schema_version INTEGER NOT NULL, meta TEXT NOT NULL, created REAL NOT NULL)",
    """CREATE TABLE logs (
        id INTEGER PRIMARY KEY, started REAL NOT NULL, pid INTEGER NOT NULL, rows INTEGER NOT NULL DEFAULT 0,
        closed REAL, clean INTEGER, dropped INTEGER NOT NULL DEFAULT 0, session TEXT, columns TEXT)""",
    """CREATE TABLE shards (
        log INTEGER NOT NULL REFERENCES logs, number INTEGER NOT NULL, file TEXT NOT NULL,
        first_row INTEGER NOT NULL, rows INTEGER NOT NULL,
        PRIMARY KEY (log, number))""",
    """CREATE TABLE records (
        id INTEGER PRIMARY KEY, log INTEGER NOT NULL REFERENCES logs, request_id TEXT NOT NULL,
        first_position INTEGER NOT NULL, num_tokens INTEGER NOT NULL, num_prompt_tokens INTEGER NOT NULL,
        complete INTEGER NOT NULL, finish_reason TEXT NOT NULL, tag TEXT, checksum BLOB NOT NULL, created REAL NOT NULL,
        extents BLOB NOT NULL, loss_mask BLOB, token_ids BLOB NOT NULL)""",
    *PARTS_SCHEMA,
    "CREATE INDEX records_by_request ON records (request_id)",
    "CREATE INDEX records_by_tag ON records (tag)",
)


class Index:
    """A connection to a store's index. Every error of SQLite leaves as a StoreError with the path."""

    def __init__(self, folder: Path, mode: str, store: object = None) -> None:
        """`store` is what messages call the folder, if not by its own name."""
        self.path = folder / INDEX_FILE
        self._store = folder if store is None else store
        with self._naming_path():
            # One connection is used by whichever thread holds its owner's lock. isolation_level None: transactions are
            # ours to begin.
            self._connection = sqlite3.connect(
                f"{self.path.absolute().as_uri()}?mode={mode}",
                uri=True,
                timeout=WAIT_FOR_OTHER_WRITERS_S,
                isolation_level=None,
                check_same_thread=False,
            )

    @classmethod
    def open_for_writing(cls, folder: Path, meta: StoreMeta) -> Index:
        """Create or open the index of `folder`.

        Raises StoreError if its rows are of another kind, or it was written in an older or newer schema.
        """
        index = cls(folder, "rwc")
        try:
            # FULL, not NORMAL: a commit must survive a power cut, and its sync is small beside the sync of its rows.
            index.execute("PRAGMA synchronous=FULL")
            if index.has_schema():
                index._refuse_other_rows(meta)
            else:
                index._create_schema(meta)
            # Last, because it is written into the file: a store that refuses a writer stays as it is, and a new one
            # has its tables in the file itself, where `lacks_tables` looks for them.
            index.execute("PRAGMA journal_mode=WAL")
        except BaseException:
            index.close()
            raise
        return index

    @classmethod
    def open_for_reading(cls, folder: Path) -> Index:
        """Open the index of `folder`. Raises StoreError if there is none."""
        if not (folder / INDEX_FILE).is_file():
            raise StoreError(f"{folder} is not a store: it has no {INDEX_FILE}")
        # Not "ro": a writer that died while it made or left the write-ahead log may have left a journal, which only a
        # connection that may write can roll back. Where the file cannot be written, SQLite opens it to be read.
        index = cls(folder, "rw")
        try:
            index.execute("PRAGMA query_only=ON")
            index._refuse_no_schema()
        except BaseException:
            index.close()
            raise
        return index

    @classmethod
    def open_copy(cls, folder: Path, store: object) -> Index:
        """Open a copy of the index of `store`, which nobody writes, in `folder`; the file may be removed then.

        Raises StoreError if it is none.
        """
        # Immutable: SQLite looks for no write-ahead log, which the copy does not have, and makes no files beside it.
        index = cls(folder, "ro&immutable=1", store)
        try:
            index._refuse_no_schema()
        except BaseException:
            index.close()
            raise
        return index

    def execute(self, statement: str, values: Sequence[object] = ()) -> list[tuple[Any, ...]]:
        with self._naming_path():
            return self._connection.execute(statement, values).fetchall()

    def execute_many(self, statement: str, rows: Iterable[Sequence[object]]) -> None:
        with self._naming_path():
            self._connection.executemany(statement, rows)

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """All of the block's statements, or none if it raises. Waits for other writers."""
        self.execute("BEGIN IMMEDIATE")
        try:
            yield
            self.execute("COMMIT")
        except BaseException:
            with self._naming_path():
                self._connection.rollback()
            raise

    def has_schema(self) -> bool:
        return bool(self.execute("SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = 'meta'"))

    def _refuse_no_schema(self) -> None:
        if not self.has_schema():
            raise StoreError(f"{self._store} is not a store: its {INDEX_FILE} has no table of records")

    def _refuse_other_rows(self, meta: StoreMeta) -> None:
        """Raises StoreError if a writer of such rows must not add to this index."""
        folder = self.path.parent
        misfits = meta.misfits(self.read_meta())
        if self.version < SCHEMA_VERSION:
            raise StoreError(
                f"{folder} was written in version {self.version} of the store's schema, which this release reads and "
                f"adds nothing to (it writes version {SCHEMA_VERSION}): use another folder"
            )
        if misfits:
            raise StoreError(f"{folder} holds other rows than this writer's ({'; '.join(misfits)}): use another folder")

    def _create_schema(self, meta: StoreMeta) -> None:
        with self.transaction():
            for statement in SCHEMA:
                self.execute(statement)
            self.execute("INSERT INTO meta VALUES (?, ?, ?)", (SCHEMA_VERSION, meta.to_json(), time.time()))

    def read_meta(self) -> StoreMeta:
        """Raises StoreError if the index was written in a newer schema."""
        version, text = self.version, self.execute("SELECT meta FROM meta")[0][0]
        if version > SCHEMA_VERSION:
            raise StoreError(
                f"{self._store} was written in version {version} of the store's schema, "
                f"and this release reads up to version {SCHEMA_VERSION}: upgrade vllm-overlay"
            )
        return StoreMeta.from_json(text)

    @cached_property
    def version(self) -> int:
        """The version of the schema that the index was written in."""
        return int(self.execute("SELECT schema_version FROM meta")[0][0])

    @property
    def first_position(self) -> str:
        """The expression for where a record begins in its request: before version 3 all began at its first token."""
        return "first_position" if self.version >= 3 else "0"

    def read_shards(self, log: int) -> list[ShardRows]:
        found = self.execute("SELECT number, file, first_row, rows FROM shards WHERE log = ? ORDER BY number", (log,))
        return [ShardRows(*row) for row in found]

    def read_log_meta(self, log: int) -> StoreMeta:
        """What is true of the rows of this log, which may hold some of the store's layers only."""
        meta = self.read_meta()
        if self.version < 2:
            return meta
        columns = self.execute("SELECT columns FROM logs WHERE id = ?", (log,))[0][0]
        return meta if columns is None else meta.narrow(json.loads(columns))

    def read_parts(self, record: int) -> list[tuple[int, bytes, bytes]]:
        """(log, packed extents, checksum) of each part of a record, the first part first."""
        parts = self.execute("SELECT log, extents, checksum FROM records WHERE id = ?", (record,))
        if self.version >= 2:
            parts += self.execute("SELECT log, extents, checksum FROM parts WHERE record = ? ORDER BY part", (record,))
        return parts

    def read_further_parts(self, record: int) -> list[tuple[int, bytes]]:
        """(log, packed extents) of each part of a record but the first, which stands with the record."""
        if self.version < 2:
            return []
        return self.execute("SELECT log, extents FROM parts WHERE record = ? ORDER BY part", (record,))

    def read_lone_parts(self, records: Sequence[int]) -> dict[int, tuple[int, bytes]]:
        """(log, packed extents) of those of these records that have one part alone, by record."""
        these = f"({', '.join(map(str, records))})"  # numbers, of which SQLite binds no more than some thousands
        several = f" AND id NOT IN (SELECT record FROM parts WHERE record IN {these})" if self.version >= 2 else ""
        found = self.execute(f"SELECT id, log, extents FROM records WHERE id IN {these}{several}")
        return {record: (log, extents) for record, log, extents in found}

    def read_extents(self, log: int) -> list[Extents]:
        """The extents of everything that records refer to in this log."""
        blobs = self.execute("SELECT extents FROM records WHERE log = ?", (log,))
        if self.version >= 2:
            blobs += self.execute("SELECT extents FROM parts WHERE log = ? AND record IS NOT NULL", (log,))
        return [unpack_extents(blob) for (blob,) in blobs]

    def read_waiting_extents(self, log: int) -> list[Extents]:
        """The extents in this log of records that will be when their other parts arrive. Schema version 2 on."""
        blobs = self.execute("SELECT extents FROM parts WHERE log = ? AND record IS NULL", (log,))
        return [unpack_extents(blob) for (blob,) in blobs]

    def write_shards(self, log: int, shards: Iterable[ShardRows]) -> None:
        self.execute_many(
            "INSERT OR REPLACE INTO shards (log, number, file, first_row, rows) VALUES (?, ?, ?, ?, ?)",
            [(log, shard.number, shard.file, shard.first_row, shard.rows) for shard in shards],
        )

    def leave_wal(self) -> None:
        """Make the index one plain file, which a read-only folder needs, unless somebody else has it open."""
        self.execute("PRAGMA busy_timeout=0")
        try:
            self._connection.execute("PRAGMA journal_mode=DELETE").fetchall()
        except sqlite3.OperationalError as error:
            logger.debug("%s stays in write-ahead mode: %s", self.path, error)

    def close(self) -> None:
        self._connection.close()

    @contextmanager
    def _naming_path(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise StoreError(f"{self._store}/{INDEX_FILE}: {error}") from error


def lacks_tables(folder: Path) -> bool:
    """Whether the index in `folder` is a file without tables: what a writer leaves that dies as it makes one, and what
    others see for a moment at each start.

    Looks at the file and takes no lock (https://www.sqlite.org/uri.html, "immutable"): another machine may be writing
    the store, and SQLite's locks are those of one machine. Raises StoreError if the file is no database.
    """
    log = folder / f"{INDEX_FILE}-wal"
    with naming_path("read", log), suppress(FileNotFoundError):
        if log.stat().st_size:  # then something was committed, and the tables may be there
            return False
    if is_being_filled(folder):
        return True
    with closing(Index(folder, "ro&immutable=1")) as index:
        return not index.has_schema()


def is_being_filled(folder: Path) -> bool:
    """Whether the first transaction of the index is under way, or died: some of its pages may be there, torn.

    The journal begins with a magic number and has at byte 16 how many pages the file had before, big-endian in 32 bits
    (https://www.sqlite.org/fileformat.html#the_rollback_journal). Without the magic it is none: the file is as it is.
    """
    journal = folder / f"{INDEX_FILE}-journal"
    with naming_path("read", journal), suppress(FileNotFoundError), journal.open("rb") as file:
        header = file.read(20)
        return header[:8] == JOURNAL_MAGIC and header[16:] == bytes(4)
    return False


def prepare_folder(folder: Path) -> None:
    """Make `folder` and what a writer needs in it. Raises StoreError if that fails or it holds something else."""
    with naming_path("create a store in", folder):
        folder.mkdir(parents=True, exist_ok=True)
        strangers = sorted(entry.name for entry in folder.iterdir() if entry.name not in (SHARDS_FOLDER, "store.lock"))
        if strangers and INDEX_FILE not in strangers:
            raise StoreError(f"{folder} is not a store and not empty (it holds {strangers[0]}): write to a new folder")
        (folder / SHARDS_FOLDER).mkdir(exist_ok=True)
