"""Stores of several replicas in one folder are one to the reader."""

from __future__ import annotations

import pickle
import shutil
from pathlib import Path

import pytest
import torch

from vllm_overlay.store import JoinedStore, Store, StoreError, StoreWriter, find_stores, measure_norms, summarize

from .conftest import MakeMeta, MakeRecord, MakeRows


@pytest.fixture
def folder(store_path: Path, make_meta: MakeMeta, make_rows: MakeRows, make_record: MakeRecord) -> Path:
    """Three stores: the folder's own, written first, and those of two replicas; all have a record with the id 0."""
    for number, path in enumerate((store_path, store_path / "replica-0-of-2", store_path / "replica-1-of-2")):
        with StoreWriter.open(path, make_meta()) as writer:
            writer.append(make_rows(4, seed=number))
            writer.commit(
                [make_record("0", range(number + 1), tag=f"tag {number}"), make_record(f"only {number}", [3])]
            )
    return store_path


def test_records_of_all_stores_are_there_once(folder: Path, make_rows: MakeRows) -> None:
    with Store.open(folder) as store:
        assert len(store) == 6
        assert [record.request_id for record in store] == ["0", "only 0", "0", "only 1", "0", "only 2"]
        assert [len(record.token_ids) for record in store] == [1, 1, 2, 1, 3, 1]
        assert torch.equal(store[3].hidden_states, make_rows(4, seed=1)[3:])
        assert torch.equal(store[-2].hidden_states, make_rows(4, seed=2)[:3])
        assert store.tags() == {"tag 0", "tag 1", "tag 2"}
        assert store.layer_ids == (2, 1, 6)
        assert "only 2" in store and "only 3" not in store
        with pytest.raises(IndexError, match=r"record 6 of .*, which has 6"):
            store[6]
        with pytest.raises(KeyError, match="has no record of request 'only 3'"):
            store["only 3"]


def test_the_newest_record_of_an_id_is_found_whichever_store_it_is_in(
    folder: Path, make_meta: MakeMeta, make_rows: MakeRows, make_record: MakeRecord
) -> None:
    with Store.open(folder) as store:
        assert store["0"].tag == "tag 2"
    with StoreWriter.open(folder / "replica-0-of-2", make_meta()) as writer:
        writer.append(make_rows(1, seed=9))
        writer.commit([make_record("0", [0], tag="again")])
    with Store.open(folder) as store:
        assert store["0"].tag == "again"


def test_a_number_stays_the_same_record_while_replicas_write(
    folder: Path, make_meta: MakeMeta, make_rows: MakeRows, make_record: MakeRecord
) -> None:
    with Store.open(folder) as store:
        with StoreWriter.open(folder / "replica-0-of-2", make_meta()) as writer:
            writer.append(make_rows(1))
            writer.commit([make_record("late", [0])])
        assert [record.request_id for record in store] == ["0", "only 0", "0", "only 1", "0", "only 2"]
        assert store.complete_numbers() == [0, 1, 2, 3, 4, 5]
    assert len(Store.open(folder)) == 7


def test_counts_and_norms_go_over_all_stores(folder: Path) -> None:
    with Store.open(folder) as store:
        summary, norms = summarize(store), measure_norms(store, 10)
        parts = [summarize(Store(path)) for path in find_stores(folder)]
    assert (summary.records, summary.complete, summary.logs, summary.rows_stored) == (6, 6, 3, 12)
    assert summary.finish_reasons == {"length": 6}
    on_disk = sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())
    assert summary.bytes_on_disk == sum(part.bytes_on_disk for part in parts) == on_disk
    assert norms is not None and (norms.records, norms.tokens) == (6, 9)


def test_a_damaged_record_is_named_by_its_number_and_its_store(folder: Path) -> None:
    shard = next((folder / "replica-1-of-2" / "shards").glob("*.safetensors"))
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    with Store.open(folder) as store:
        damages = list(store.verify())
    assert [(damage.index, damage.request_id) for damage in damages] == [(5, "only 2")]
    assert damages[0].rows == (f"replica-1-of-2/shards/{shard.name} 3..3",)


def test_it_is_read_in_another_process(folder: Path) -> None:
    with Store.open(folder) as store:
        again = pickle.loads(pickle.dumps(store))  # noqa: S301
    assert isinstance(again, JoinedStore)
    assert len(again) == 6


def test_replicas_alone_are_a_store_too(folder: Path) -> None:
    (folder / "index.sqlite").unlink()
    assert [path.name for path in find_stores(folder)] == ["replica-0-of-2", "replica-1-of-2"]
    with Store.open(folder) as store:
        assert [record.request_id for record in store] == ["0", "only 1", "0", "only 2"]


def test_stores_of_other_rows_are_not_joined(folder: Path, make_meta: MakeMeta) -> None:
    StoreWriter.open(folder / "replica-other", make_meta(model_fingerprint="beef")).close()
    with pytest.raises(StoreError, match=r"replica-other holds other rows than .*: model_fingerprint"):
        Store.open(folder)


def test_a_folder_without_any_is_no_store(tmp_path: Path) -> None:
    (tmp_path / "replica-0-of-2").mkdir()
    with pytest.raises(StoreError, match="is not a store"):
        Store.open(tmp_path)


def test_a_replica_that_died_before_its_tables_is_passed_over(
    folder: Path, make_meta: MakeMeta, caplog: pytest.LogCaptureFixture
) -> None:
    """Between the making of its index and that of the tables in it, or for a moment at each start."""
    (folder / "replica-dead" / "shards").mkdir(parents=True)
    (folder / "replica-dead" / "index.sqlite").touch()
    assert [path.name for path in find_stores(folder)] == ["store", "replica-0-of-2", "replica-1-of-2"]
    with Store.open(folder) as store:
        assert len(store) == 6
    assert len(caplog.messages) == 1
    assert "replica-dead holds no records: its index.sqlite has no tables yet" in caplog.text
    StoreWriter.open(folder / "replica-dead", make_meta()).close()
    assert len(find_stores(folder)) == 4


def test_a_replica_that_died_while_it_made_its_tables_is_passed_over(folder: Path, make_meta: MakeMeta) -> None:
    """What `tools/crash_store.py --seed 11` left once: pages of the tables, torn, and the journal that undoes them."""
    dead = folder / "replica-dead"
    StoreWriter.open(dead, make_meta()).close()
    index, journal = dead / "index.sqlite", dead / "index.sqlite-journal"
    index.write_bytes(index.read_bytes()[:-5000])
    with pytest.raises(StoreError, match="malformed"):
        find_stores(folder)
    # Magic, no record, a nonce, a file of 0 pages before, sectors of 512 bytes, pages of 4096.
    journal.write_bytes(
        bytes.fromhex("d9d505f920a163d7 00000000 766caa9b 00000000 00000200 00001000").ljust(512, b"\0")
    )
    assert [path.name for path in find_stores(folder)] == ["store", "replica-0-of-2", "replica-1-of-2"]
    StoreWriter.open(dead, make_meta()).close()
    assert dead in find_stores(folder)


@pytest.mark.parametrize(
    "header",
    [
        pytest.param("d9d505f920a163d7 00000000 766caa9b 0000000a", id="for a moment when a writer leaves the WAL"),
        pytest.param("00000000", id="zeros, which a power cut may leave"),
        pytest.param("", id="empty"),
    ],
)
def test_a_journal_that_undoes_no_tables_does_not_hide_the_store(folder: Path, header: str) -> None:
    (folder / "index.sqlite-journal").write_bytes(bytes.fromhex(header).ljust(512 if header else 0, b"\0"))
    assert folder in find_stores(folder)


def test_a_store_that_died_before_its_tables_is_opened_by_the_next_writer(
    store_path: Path, make_meta: MakeMeta, make_rows: MakeRows, make_record: MakeRecord
) -> None:
    store_path.mkdir()
    (store_path / "index.sqlite").touch()
    assert find_stores(store_path) == []
    with StoreWriter.open(store_path, make_meta()) as writer:
        writer.append(make_rows(1))
        writer.commit([make_record("a", [0])])
        assert find_stores(store_path) == [store_path]
    assert find_stores(store_path) == [store_path]


def test_looking_for_stores_leaves_the_files_of_a_live_writer_alone(store_path: Path, make_meta: MakeMeta) -> None:
    """It may be another machine's: a connection to its write-ahead log would remove it when it closes."""
    replica = store_path / "replica-elsewhere"
    with StoreWriter.open(store_path, make_meta()):
        shutil.copytree(store_path, replica)  # where nobody holds SQLite's locks
    (replica / "index.sqlite-wal").write_bytes(b"")
    before = {path.name: path.read_bytes() for path in replica.glob("index.*")}
    assert find_stores(store_path) == [store_path, replica]
    assert {path.name: path.read_bytes() for path in replica.glob("index.*")} == before


def test_an_index_that_is_no_database_is_not_passed_over(folder: Path) -> None:
    (folder / "replica-0-of-2" / "index.sqlite").write_text("x" * 5000)
    with pytest.raises(StoreError, match=r"replica-0-of-2/index.sqlite: file is not a database"):
        Store.open(folder)
