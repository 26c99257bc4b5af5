"""What goes wrong on disk reaches the caller with its path, and leaves no wrong record."""

from __future__ import annotations

import errno
import os
import queue
import shutil
import sqlite3
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from vllm_overlay.store import Store, StoreError, StoreMeta, StoreWriter, log
from vllm_overlay.store.index import Index
from vllm_overlay.store.log import LogLock


def test_short_writes_are_continued(store_path, meta, make_rows, make_record, monkeypatch) -> None:
    write = os.pwrite
    sizes = []

    def write_little(fd: int, data: memoryview, offset: int) -> int:
        sizes.append(write(fd, data[:7], offset))
        return sizes[-1]

    rows = make_rows(3)
    with StoreWriter.open(store_path, meta) as writer:
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", write_little)
            writer.append(rows)
        writer.commit([make_record("a", range(3))])
    assert max(sizes) == 7
    assert torch.equal(Store.open(store_path)[0].hidden_states, rows)


def test_full_disk_is_said_with_the_path_and_the_writer_goes_on(
    store_path, meta, make_rows, make_record, monkeypatch
) -> None:
    """CASES.md 19: an error with the path; nothing half-written is ever read as a record."""
    write = os.pwrite
    calls = []

    def fill_disk(fd: int, data: memoryview, offset: int) -> int:
        calls.append(offset)
        if len(calls) > 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(fd, data[:50], offset)

    rows = make_rows(6)
    with StoreWriter.open(store_path, meta, rows_per_shard=2) as writer:
        writer.append(rows[:1])
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", fill_disk)
            with pytest.raises(StoreError, match=r"cannot write .*0001-0000\d\.safetensors: No space left on device"):
                writer.append(rows[1:4])
        assert writer.num_rows == 1
        with pytest.raises(StoreError, match=r"rows 0..1, and this log has 1"):
            writer.commit([make_record("half", range(2))])
        assert len(Store.open(store_path)) == 0
        writer.append(rows[1:4])
        writer.commit([make_record("whole", range(4))])
    assert torch.equal(Store.open(store_path)["whole"].hidden_states, rows[:4])


@pytest.mark.parametrize("failing", ["pwrite", "ftruncate"])
def test_full_disk_at_a_new_shard_leaves_no_file(
    failing: str, store_path, meta, make_rows, make_record, monkeypatch
) -> None:
    def fail(*_: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    rows = make_rows(4)
    with StoreWriter.open(store_path, meta, rows_per_shard=2) as writer:
        writer.append(rows[:2])
        with monkeypatch.context() as patch:
            patch.setattr(os, failing, fail)
            with pytest.raises(StoreError, match=r"0001-00001\.safetensors: No space left on device"):
                writer.append(rows[2:])
        assert sorted(path.name for path in (store_path / "shards").iterdir()) == [
            "0001-00000.safetensors",
            "0001.lock",
        ]
        writer.append(rows[2:])
        writer.commit([make_record("a", range(4))])
    assert torch.equal(Store.open(store_path)[0].hidden_states, rows)


def test_append_that_fails_in_its_second_shard_can_be_repeated(
    store_path, meta, make_rows, make_record, monkeypatch
) -> None:
    write = os.pwrite

    def fail_on_row_3(fd: int, data: memoryview, offset: int) -> int:
        if bytes(data[: meta.row_bytes]) == rows[3].numpy().tobytes():
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return write(fd, data, offset)

    rows = make_rows(5)
    with StoreWriter.open(store_path, meta, rows_per_shard=3) as writer:
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", fail_on_row_3)
            with pytest.raises(StoreError, match=r"0001-00001.safetensors: Input/output error"):
                writer.append(rows)
        writer.commit([])
        writer.append(rows[:2])
        writer.commit([make_record("short", range(2))])
        assert torch.equal(Store.open(store_path)["short"].hidden_states, rows[:2])
        writer.append(rows[2:])
        writer.commit([make_record("all", range(5))])
    assert torch.equal(Store.open(store_path)["all"].hidden_states, rows)


def test_failed_sync_writes_no_record_and_none_after_it(
    store_path, meta, make_rows, make_record, monkeypatch, caplog
) -> None:
    def fail(_: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    writer = StoreWriter.open(store_path, meta)
    writer.append(make_rows(2))
    writer.commit([make_record("before", [0])])
    writer.append(make_rows(1))
    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", fail)
        with pytest.raises(StoreError, match=r"cannot sync .*0001-00000\.safetensors: Input/output error"):
            writer.commit([make_record("lost", [1])])
    with pytest.raises(StoreError, match="rows may be lost, no further record is written: cannot sync"):
        writer.commit([make_record("after", [1])])
    writer.close()
    assert [record.request_id for record in Store.open(store_path)] == ["before"]
    StoreWriter.open(store_path, meta).close()
    assert "log 1 of" in caplog.text and "2 of its 3 rows are in no record and were dropped" in caplog.text


def test_full_shards_are_put_on_disk_before_anybody_commits(store_path, meta, make_rows, monkeypatch) -> None:
    sync, synced = os.fdatasync, queue.SimpleQueue()

    def note(fd: int) -> None:
        sync(fd)
        synced.put(Path(f"/proc/self/fd/{fd}").readlink().name)

    monkeypatch.setattr(os, "fdatasync", note)
    with StoreWriter.open(store_path, meta, rows_per_shard=2) as writer:
        writer.append(make_rows(5))
        assert {synced.get(timeout=20) for _ in range(2)} == {"0001-00000.safetensors", "0001-00001.safetensors"}
        assert synced.empty()
        writer.commit([])
        assert synced.get_nowait() == "0001-00002.safetensors"
        assert synced.empty()


def test_a_sync_that_failed_before_the_commit_is_not_forgotten(
    store_path, meta, make_rows, make_record, monkeypatch
) -> None:
    """The kernel says it once for each open file: a second sync of this shard would succeed."""
    sync, failed = os.fdatasync, threading.Event()

    def fail_once(fd: int) -> None:
        if not failed.is_set():
            failed.set()
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        sync(fd)

    monkeypatch.setattr(os, "fdatasync", fail_once)
    with StoreWriter.open(store_path, meta, rows_per_shard=2) as writer:
        writer.append(make_rows(2))
        assert failed.wait(20)
        with pytest.raises(StoreError, match=r"cannot sync .*0001-00000\.safetensors: Input/output error"):
            writer.commit([make_record("lost", range(2))])
        with pytest.raises(StoreError, match="rows may be lost, no further record is written"):
            writer.commit([make_record("lost", range(2))])
    assert len(Store.open(store_path)) == 0


def test_a_full_shard_that_could_not_be_put_on_disk_stops_the_rows(store_path, meta, make_rows, monkeypatch) -> None:
    """Not only the next commit, before which a server may write for long."""

    def fail(_: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch, StoreWriter.open(store_path, meta, rows_per_shard=2) as writer:
        patch.setattr(os, "fdatasync", fail)
        writer.append(make_rows(2))
        with pytest.raises(StoreError, match=r"cannot sync .*0001-00000\.safetensors: Input/output error"):
            for _ in range(1000):
                writer.append(make_rows(1))
                time.sleep(0.01)
        assert writer.num_rows < 100


def test_a_sync_that_was_interrupted_may_have_failed(store_path, meta, make_rows, make_record, monkeypatch) -> None:
    """The kernel said it to nobody: a second sync would succeed."""

    def interrupt(_: Any) -> None:
        raise KeyboardInterrupt

    with StoreWriter.open(store_path, meta) as writer:
        writer.append(make_rows(2))
        with monkeypatch.context() as patch:
            patch.setattr(log, "wait", interrupt)
            with pytest.raises(KeyboardInterrupt):
                writer.commit([make_record("lost", range(2))])
        with pytest.raises(StoreError, match="rows may be lost, no further record is written"):
            writer.commit([make_record("lost", range(2))])
    assert len(Store.open(store_path)) == 0


def test_error_in_the_transaction_leaves_no_half_batch(store_path, meta, make_rows, make_record, monkeypatch) -> None:
    insert = Index.execute_many

    def insert_and_fail(self: Index, statement: str, rows: Any) -> None:
        insert(self, statement, rows)
        if "records" in statement:
            raise StoreError("disk I/O error")

    rows = make_rows(2)
    with StoreWriter.open(store_path, meta) as writer:
        writer.append(rows)
        with monkeypatch.context() as patch:
            patch.setattr(Index, "execute_many", insert_and_fail)
            with pytest.raises(StoreError, match="disk I/O error"):
                writer.commit([make_record("a", [0]), make_record("b", [1])])
        assert len(Store.open(store_path)) == 0
        writer.commit([make_record("c", [1])])
    store = Store.open(store_path)
    assert [record.request_id for record in store] == ["c"]
    assert torch.equal(store[0].hidden_states, rows[1:])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_ids": (1, 2, 6)}, r"layer_ids: expected \(1, 2, 6\), found \(2, 1, 6\)"),
        ({"hidden_size": 16}, "hidden_size: expected 16, found 8"),
        ({"dtype": "bfloat16"}, "dtype: expected bfloat16, found float32"),
        ({"num_hidden_layers": 8}, "num_hidden_layers: expected 8, found 6"),
        ({"model_fingerprint": "beef"}, "model_fingerprint: expected beef, found f00d"),
    ],
)
def test_rows_of_another_target_are_refused(changes: dict[str, Any], message: str, store_path, meta, make_meta) -> None:
    StoreWriter.open(store_path, meta).close()
    with pytest.raises(
        StoreError, match=rf"store holds other rows than this writer's \({message}\): use another folder"
    ):
        StoreWriter.open(store_path, make_meta(**changes))
    with StoreWriter.open(store_path, make_meta(model="renamed", vllm_version="0.33.0", runner="V1")):
        pass


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_ids": (7,)}, r"layer ids \[7\] are outside 0..6"),
        ({"layer_ids": (1, 1)}, r"one or more different numbers, not \[1, 1\]"),
        ({"layer_ids": ()}, r"one or more different numbers, not \[\]"),
        ({"dtype": "int8"}, "holds float32, bfloat16, float16, float8_e4m3fn, not 'int8'"),
        ({"hidden_size": 0}, "hidden size must be at least 1"),
    ],
)
def test_impossible_meta_is_refused(changes: dict[str, Any], message: str, make_meta) -> None:
    """CASES.md 13: id 7 of a target with 6 layers is an error."""
    with pytest.raises(StoreError, match=message):
        make_meta(**changes)


def test_folders_that_are_not_stores_are_refused_and_left_alone(tmp_path: Path, meta: StoreMeta) -> None:
    with pytest.raises(StoreError, match=r"absent is not a store: it has no index.sqlite"):
        Store.open(tmp_path / "absent")
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.tex").write_text("x")
    with pytest.raises(StoreError, match=r"other is not a store and not empty \(it holds thesis.tex\)"):
        StoreWriter.open(other, meta)
    assert [path.name for path in other.iterdir()] == ["thesis.tex"]
    with pytest.raises(StoreError, match=r"cannot create a store in .*thesis.tex: File exists"):
        StoreWriter.open(other / "thesis.tex", meta)
    (other / "index.sqlite").write_text("this is no database, although it has the name of one" * 20)
    with pytest.raises(StoreError, match=r"index.sqlite: file is not a database"):
        Store.open(other)
    (other / "index.sqlite").write_bytes(b"")
    with pytest.raises(StoreError, match=r"other is not a store: its index.sqlite has no table of records"):
        Store.open(other)
    assert sorted(path.name for path in other.iterdir()) == ["index.sqlite", "thesis.tex"]


def test_newer_schema_is_refused_with_both_versions(store_path, meta) -> None:
    StoreWriter.open(store_path, meta).close()
    with sqlite3.connect(store_path / "index.sqlite") as connection:
        connection.execute("UPDATE meta SET schema_version = 7")
    connection.close()
    message = "written in version 7 of the store's schema, and this release reads up to version 3"
    with pytest.raises(StoreError, match=message):
        Store.open(store_path)
    with pytest.raises(StoreError, match=message):
        StoreWriter.open(store_path, meta)


@pytest.mark.parametrize("version", [2, 3, 7])
def test_a_refused_writer_leaves_the_index_as_it_is(version: int, store_path, meta, make_meta) -> None:
    """A store put aside as finished is one plain file, which a read-only mount needs, and stays it."""
    StoreWriter.open(store_path, meta).close()
    with sqlite3.connect(store_path / "index.sqlite") as connection:
        connection.execute("UPDATE meta SET schema_version = ?", (version,))
    connection.close()
    before = (store_path / "index.sqlite").read_bytes()
    assert before[18:20] == b"\x01\x01"  # https://www.sqlite.org/fileformat2.html: a journal, no write-ahead log
    with pytest.raises(StoreError):
        StoreWriter.open(store_path, make_meta(model_fingerprint="beef"))
    assert (store_path / "index.sqlite").read_bytes() == before


def test_index_whose_writer_died_in_a_transaction_is_read_as_before_it(
    tmp_path, store_path, meta, make_rows, make_record
) -> None:
    """A writer makes and leaves the write-ahead log in transactions with a journal; the copy is what a death leaves."""
    rows = make_rows(2)
    with StoreWriter.open(store_path, meta) as writer:
        writer.append(rows)
        writer.commit([make_record("a", range(2))] * 100)
    connection = sqlite3.connect(store_path / "index.sqlite", isolation_level=None)
    connection.execute("PRAGMA cache_size=1")
    connection.execute("BEGIN")
    connection.execute("UPDATE records SET extents = zeroblob(1000)")
    shutil.copytree(store_path, tmp_path / "dead")
    connection.close()
    assert (tmp_path / "dead" / "index.sqlite-journal").stat().st_size > 0
    with Store.open(tmp_path / "dead") as store:
        assert len(store) == 100
        assert torch.equal(store[99].hidden_states, rows)
        with pytest.raises(StoreError, match="readonly database"):
            store.index.execute("DELETE FROM records")


def test_closed_store_is_one_plain_index_file(store_path, meta, make_rows, make_record) -> None:
    """A folder that cannot be written is readable only without SQLite's write-ahead files."""
    with StoreWriter.open(store_path, meta) as writer:
        writer.append(make_rows(1))
        writer.commit([make_record("a", [0])])
        assert (store_path / "index.sqlite-wal").exists()
    assert sorted(path.name for path in store_path.iterdir()) == ["index.sqlite", "shards", "store.lock"]
    with sqlite3.connect(store_path / "index.sqlite") as connection:
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("delete",)
    connection.close()


def test_closing_with_a_reader_does_not_wait_or_fail(store_path, meta, make_rows, make_record) -> None:
    writer = StoreWriter.open(store_path, meta)
    store = Store.open(store_path)
    assert len(store) == 0
    writer.append(make_rows(1))
    writer.commit([make_record("a", [0])])
    writer.close()
    assert len(store) == 1
    with StoreWriter.open(store_path, meta) as writer:
        writer.append(make_rows(1))
        writer.commit([make_record("b", [0])])
        assert len(store) == 2


def test_append_that_fails_in_a_new_shard_leaves_none_at_the_close(store_path, meta, make_rows, monkeypatch) -> None:
    def fail(*_: Any) -> None:
        raise StoreError("no count")

    with StoreWriter.open(store_path, meta, rows_per_shard=2) as writer:
        writer.append(make_rows(2))
        with monkeypatch.context() as patch:
            patch.setattr(LogLock, "write_count", fail)
            with pytest.raises(StoreError, match="no count"):
                writer.append(make_rows(2))
    assert [path.name for path in (store_path / "shards").iterdir()] == ["0001-00000.safetensors"]


def test_writer_that_cannot_begin_its_log_can_be_opened_again(store_path, meta, make_rows, monkeypatch) -> None:
    execute = Index.execute

    def fail_to_commit(self: Index, statement: str, values: Any = ()) -> Any:
        if statement == "COMMIT" and execute(self, "SELECT count(*) FROM logs") == [(1,)]:
            raise StoreError("disk full")
        return execute(self, statement, values)

    with monkeypatch.context() as patch:
        patch.setattr(Index, "execute", fail_to_commit)
        with pytest.raises(StoreError, match="disk full"):
            StoreWriter.open(store_path, meta)
    with StoreWriter.open(store_path, meta) as writer:
        assert writer.append(make_rows(1)) == 0


def test_rows_per_shard_must_be_positive(store_path, meta) -> None:
    with pytest.raises(StoreError, match="at least one row, not 0"):
        StoreWriter.open(store_path, meta, rows_per_shard=0)
    assert not store_path.exists()
