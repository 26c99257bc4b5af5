"""Checksums: the definition spelt out in plain Python, nothing read back at a commit, and stores of before."""

from __future__ import annotations

import hashlib
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import xxhash

from vllm_overlay.store import Store, StoreError, StoreWriter, checksum, row_hashes, summarize
from vllm_overlay.store.checksum import hash_rows
from vllm_overlay.store.shard import Shard


def hash_by_definition(row: bytes) -> int:
    row += bytes(-len(row) % 4)
    words = [int.from_bytes(row[at : at + 4], "little") for at in range(0, len(row), 4)]
    drawn = hashlib.shake_128(b"vllm-overlay row hash").digest(8 * len(words))
    weights = [int.from_bytes(drawn[8 * at : 8 * at + 8], "little") | 1 for at in range(len(words))]
    return sum(word * weight for word, weight in zip(words, weights, strict=True)) % 2**64


@pytest.mark.parametrize("row_bytes", [2, 6, 96, 4096])
def test_hash_of_a_row_is_the_one_defined(row_bytes: int) -> None:
    data = np.random.default_rng(0).integers(0, 256, 5 * row_bytes, dtype=np.uint8).tobytes()
    expected = [hash_by_definition(data[at : at + row_bytes]) for at in range(0, len(data), row_bytes)]
    assert hash_rows(memoryview(data), row_bytes).tolist() == expected


def test_changes_that_cancel_out_in_a_plain_sum_show() -> None:
    """Signs of two numbers, which are the highest bits of their words, and two words that changed places."""
    row = np.random.default_rng(0).integers(0, 2**32, 24, dtype=np.uint32)
    signs, places = row.copy(), row.copy()
    signs[[1, 7]] ^= np.uint32(1 << 31)
    places[[1, 7]] = row[[7, 1]]
    hashes = hash_rows(memoryview(np.stack((row, signs, places)).tobytes()), row.nbytes)
    assert len(set(hashes.tolist())) == 3


def test_checksum_of_a_record_is_the_one_defined(store_path, meta, make_rows, make_record) -> None:
    rows = make_rows(6)
    layout = [4, -1, 0, 1]
    with StoreWriter.open(store_path, meta, rows_per_shard=3) as writer:
        writer.append(rows)
        writer.commit([make_record("a", layout)])
    hashes = [hash_by_definition(rows[row].numpy().tobytes()) for row in (4, 0, 1)]
    content = np.arange(100, 104, dtype="<i8").tobytes() + np.array(hashes, dtype="<u8").tobytes()
    ((checksum,),) = Store.open(store_path).index.execute("SELECT checksum FROM records")
    assert checksum == xxhash.xxh3_64(content).digest()


@pytest.fixture
def read_rows_of_shards(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The first row of each read of a shard."""
    read, seen = Shard.read, []

    def read_and_note(self: Shard, row: int, out: memoryview) -> None:
        seen.append(row)
        read(self, row, out)

    monkeypatch.setattr(Shard, "read", read_and_note)
    return seen


def test_commit_reads_no_row_back(store_path, meta, make_rows, make_record, read_rows_of_shards, monkeypatch) -> None:
    monkeypatch.setattr(row_hashes, "CHUNK_ROWS", 4)
    with StoreWriter.open(store_path, meta, rows_per_shard=5) as writer:
        writer.append(make_rows(3))
        writer.append(make_rows(10, seed=1))
        writer.commit([make_record("a", range(13)), make_record("b", [12, 3, 4, 0])])
    assert read_rows_of_shards == []
    assert list(Store.open(store_path).verify()) == []


def test_hashes_that_are_kept_no_more_are_made_from_disk(
    store_path, meta, make_rows, make_record, read_rows_of_shards, monkeypatch
) -> None:
    """Two chunks of 4 rows are kept: those that came or were used last."""
    monkeypatch.setattr(row_hashes, "CHUNK_ROWS", 4)
    monkeypatch.setattr(row_hashes, "KEPT_CHUNKS", 2)
    with StoreWriter.open(store_path, meta) as writer:
        writer.append(make_rows(8))
        writer.commit([make_record("a", [0, 1])])
        writer.append(make_rows(4, seed=1))
        writer.commit([make_record("b", [1, 2, 8])])
        assert read_rows_of_shards == []
        writer.commit([make_record("c", [10, 6, 7, 4, 0])])
        assert read_rows_of_shards == [6, 4]
    assert list(Store.open(store_path).verify()) == []


def test_rows_of_an_append_that_failed_leave_no_hash(store_path, meta, make_rows, make_record, monkeypatch) -> None:
    def fail(*_: object) -> int:
        raise OSError("full")

    with StoreWriter.open(store_path, meta) as writer:
        with monkeypatch.context() as patch:
            patch.setattr("os.pwrite", fail)
            with pytest.raises(StoreError):
                writer.append(make_rows(3))
        writer.append(make_rows(2, seed=1))
        writer.commit([make_record("a", range(2))])
    assert list(Store.open(store_path).verify()) == []


def make_older(path: Path, version: int) -> sqlite3.Connection:
    """The store's index as this version of the schema has it, but for the checksums."""
    connection = sqlite3.connect(path / "index.sqlite")
    for table in ("records", "parts"):
        connection.execute(f"ALTER TABLE {table} DROP COLUMN first_position")
    if version == 1:
        connection.execute("DROP TABLE parts")
        for column in ("session", "columns"):
            connection.execute(f"ALTER TABLE logs DROP COLUMN {column}")
    connection.execute("UPDATE meta SET schema_version = ?", (version,))
    return connection


@pytest.fixture
def older_store(store_path, meta, make_rows, make_record) -> Path:
    """A store of schema version 1: the checksum goes over the token ids and the rows themselves."""
    rows = make_rows(9)
    layout = {"a": [0, 1, 2], "b": [-1, 2, 7, 8]}
    with StoreWriter.open(store_path, meta, rows_per_shard=4) as writer:
        writer.append(rows)
        writer.commit([make_record(name, numbers) for name, numbers in layout.items()])
    with make_older(store_path, 1) as connection:
        for name, numbers in layout.items():
            content = np.arange(100, 100 + len(numbers), dtype="<i8").tobytes()
            content += b"".join(rows[row].numpy().tobytes() for row in numbers if row >= 0)
            connection.execute(
                "UPDATE records SET checksum = ? WHERE request_id = ?", (xxhash.xxh3_64(content).digest(), name)
            )
    connection.close()
    return store_path


def test_older_store_is_read_and_verified_by_its_own_definition(older_store: Path, make_rows: Callable) -> None:
    with Store.open(older_store) as store:
        assert torch.equal(store["a"].hidden_states, make_rows(9)[:3])
        assert list(store.verify()) == []
    shard = older_store / "shards" / "0001-00001.safetensors"
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    (damage,) = Store.open(older_store).verify()
    assert damage.request_id == "b" and "checksum" in damage.problem


def test_older_store_is_not_added_to(older_store: Path, meta) -> None:
    message = "was written in version 1 of the store's schema, .* adds nothing to .*: use another folder"
    with pytest.raises(StoreError, match=message):
        StoreWriter.open(older_store, meta)
    assert len(Store.open(older_store)) == 2


def test_store_of_version_2_is_read_and_not_added_to(store_path, meta, make_rows, make_record) -> None:
    """All its records begin at their request's first position."""
    rows = make_rows(3)
    with StoreWriter.open(store_path, meta) as writer:
        writer.append(rows)
        writer.commit([make_record("a", range(3))])
    with make_older(store_path, 2) as connection:
        connection.commit()
    connection.close()
    with Store.open(store_path) as store:
        assert store["a"].first_position == 0
        assert torch.equal(store[0].hidden_states, rows)
        assert list(store.verify()) == []
        assert summarize(store).windows == 0
    with pytest.raises(StoreError, match="was written in version 2"):
        StoreWriter.open(store_path, meta)


def test_an_error_of_a_thread_that_hashes_reaches_the_append(
    store_path, meta, make_rows, make_record, monkeypatch
) -> None:
    def fail(*_: object) -> None:
        raise MemoryError("no room for a copy")

    with StoreWriter.open(store_path, meta) as writer:
        with monkeypatch.context() as patch:
            patch.setattr(checksum, "hash_rows", fail)
            with pytest.raises(MemoryError, match="no room for a copy"):
                writer.append(make_rows(3))
        first = writer.append(make_rows(2, seed=1))
        writer.commit([make_record("a", range(first, first + 2))])
    assert list(Store.open(store_path).verify()) == []


def test_a_writer_that_is_closed_leaves_no_thread(store_path, meta, make_rows) -> None:
    before = threading.active_count()
    with StoreWriter.open(store_path, meta) as writer:
        writer.append(make_rows(1))
    assert threading.active_count() == before
