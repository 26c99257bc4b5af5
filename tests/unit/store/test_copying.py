"""A new store with records of others, which shares whole files of rows with them."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.unit.store.conftest import MakeMeta, MakeRecord, MakeRows
from vllm_overlay.cli import main
from vllm_overlay.store import Part, Record, Store, StoreMeta, StoreWriter, summarize
from vllm_overlay.store.index import Index
from vllm_overlay.store.retire import Retirer

Fill = Callable[..., Path]


@pytest.fixture
def fill(tmp_path: Path, meta: StoreMeta, make_rows: MakeRows, make_record: MakeRecord) -> Fill:
    """A store of 5 records of 4 rows each, in shards of 8 rows: two share their first 2 rows, one misses a row, and
    the last two of the 20 rows are in no record."""

    def make(name: str, seed: int = 0) -> Path:
        with StoreWriter.open(tmp_path / name, meta, rows_per_shard=8) as writer:
            writer.append(make_rows(20, seed=seed))
            writer.commit(
                [
                    make_record(f"{name}-0", range(4), tag="x"),
                    make_record(f"{name}-1", [0, 1, 4, 5], first_position=3),
                    make_record(f"{name}-2", [6, -1, 7, 8], tag="y"),
                    make_record(f"{name}-3", range(9, 13), tag="x", loss_mask=torch.tensor([False] * 4).numpy()),
                    make_record(f"{name}-4", range(14, 18)),
                ]
            )
        return tmp_path / name

    return make


def describe(record: Record) -> tuple[Any, ...]:
    facts = (record.request_id, record.num_prompt_tokens, record.complete, record.finish_reason, record.tag)
    mask = None if record.loss_mask is None else record.loss_mask.tolist()
    states = record.hidden_states.tolist() if record.complete else None
    return (*facts, record.first_position, record.token_ids.tolist(), mask, states)


def read(*folders: Path) -> list[tuple[Any, ...]]:
    found = []
    for folder in folders:
        with Store.open(folder) as store:
            assert list(store.verify()) == []
            found += [describe(record) for record in store]
    return found


def list_inodes(folder: Path) -> set[int]:
    return {path.stat().st_ino for path in (folder / "shards").iterdir()}


def test_stores_are_merged_and_share_their_files(
    fill: Fill, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two, merged = fill("one"), fill("two", seed=1), tmp_path / "merged"
    assert main(["copy", str(one), str(two), "-o", str(merged)]) == 0
    said = capsys.readouterr().out
    assert "10 records in" in said
    assert "0 left out; rows: 3.8 KiB in files shared with the old stores, 0 bytes written" in said  # 40 rows of 96
    assert read(merged) == read(one, two)
    assert list_inodes(merged) == list_inodes(one) | list_inodes(two)
    with Store.open(merged) as store:
        summary = summarize(store)
    assert (summary.records, summary.logs, summary.logs_open, summary.rows_stored) == (10, 2, 0, 40)


def test_the_merged_store_outlives_the_others_and_takes_more(
    fill: Fill, tmp_path: Path, meta: StoreMeta, make_rows: MakeRows, make_record: MakeRecord
) -> None:
    one, merged = fill("one"), tmp_path / "merged"
    before = read(one)
    assert main(["copy", str(one), "-o", str(merged)]) == 0
    with StoreWriter.open(merged, meta) as writer:
        writer.append(make_rows(2, seed=5))
        writer.commit([make_record("new", range(2))])
    for path in (one / "shards").iterdir():
        path.unlink()
    found = read(merged)
    assert found[:-1] == before and found[-1][0] == "new"


@pytest.mark.parametrize(
    ("words", "numbers"),
    [
        (["--tag", "x"], [0, 3]),
        (["--tag", "x", "--tag", "y"], [0, 2, 3]),
        (["--complete"], [0, 1, 3, 4]),
        (["--records", "1:3"], [1, 2]),
        (["--records", "3:"], [3, 4]),
        (["--records", "2:", "--complete"], [3, 4]),
    ],
)
def test_a_subset_has_the_rows_of_its_records_alone(
    words: list[str], numbers: list[int], fill: Fill, tmp_path: Path
) -> None:
    one, subset = fill("one"), tmp_path / "subset"
    assert main(["copy", str(one), "-o", str(subset), *words]) == 0
    everything = read(one)
    assert read(subset) == [everything[number] for number in numbers]
    rows = {0: {0, 1, 2, 3}, 1: {0, 1, 4, 5}, 2: {6, 7, 8}, 3: {9, 10, 11, 12}, 4: {14, 15, 16, 17}}
    with Store.open(subset) as store:
        assert summarize(store).rows_stored == len(set().union(*(rows[number] for number in numbers)))
    for path in (subset / "shards").iterdir():
        assert load_file(path)["hidden_states"].shape[1:] == (3, 8)


def test_a_shard_of_which_every_row_is_kept_is_shared(fill: Fill, tmp_path: Path) -> None:
    one, subset = fill("one"), tmp_path / "subset"
    assert main(["copy", str(one), "-o", str(subset), "--records", "0:3"]) == 0
    assert len(list_inodes(subset)) == 2
    assert list_inodes(subset) & list_inodes(one) == {(one / "shards" / "0001-00000.safetensors").stat().st_ino}


def test_without_hard_links_files_are_copied(fill: Fill, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    one, merged = fill("one"), tmp_path / "merged"
    monkeypatch.setattr(os, "link", refuse)
    assert main(["copy", str(one), "-o", str(merged)]) == 0
    assert read(merged) == read(one) and not list_inodes(merged) & list_inodes(one)


def test_a_log_that_is_being_written_is_copied(
    tmp_path: Path, meta: StoreMeta, make_rows: MakeRows, make_record: MakeRecord
) -> None:
    with StoreWriter.open(tmp_path / "growing", meta, rows_per_shard=4) as writer:
        writer.append(make_rows(4))
        writer.commit([make_record("a", range(4))])
        assert main(["copy", str(tmp_path / "growing"), "-o", str(tmp_path / "copy")]) == 0
        assert read(tmp_path / "copy") == read(tmp_path / "growing")
        assert not list_inodes(tmp_path / "copy") & list_inodes(tmp_path / "growing")


def test_a_log_that_is_closed_while_it_is_read_is_copied(
    tmp_path: Path, meta: StoreMeta, make_rows: MakeRows, make_record: MakeRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its file is shortened then: it has fewer rows than the index said a moment ago."""
    writer = StoreWriter.open(tmp_path / "closing", meta, rows_per_shard=8)
    writer.append(make_rows(4))
    writer.commit([make_record("a", range(4))])
    read_shards = Index.read_shards

    def read_and_close(self: Index, log: int) -> Any:
        shards = read_shards(self, log)
        writer.close()
        return shards

    with monkeypatch.context() as patch:
        patch.setattr(Index, "read_shards", read_and_close)
        assert main(["copy", str(tmp_path / "closing"), "-o", str(tmp_path / "copy")]) == 0
    assert read(tmp_path / "copy") == read(tmp_path / "closing")
    assert not list_inodes(tmp_path / "copy") & list_inodes(tmp_path / "closing")
    with Store.open(tmp_path / "copy") as store:
        assert summarize(store).rows_stored == 4


def test_a_store_whose_rows_were_retired(
    tmp_path: Path, meta: StoreMeta, make_rows: MakeRows, make_record: MakeRecord
) -> None:
    """The first file stays for a prefix of it, the second is gone: rows are not where a count of files says."""
    source = tmp_path / "a"
    with StoreWriter.open(source, meta, rows_per_shard=8) as writer:
        writer.append(make_rows(24))
        writer.commit([make_record("gone", range(7, 12)), make_record("kept", [0, 1, *range(18, 24)])])
    retirer = Retirer(source)
    assert retirer.retire(1, keep_bytes=0).files == 1
    retirer.close()
    assert main(["copy", str(source), "-o", str(tmp_path / "all")]) == 0
    assert read(tmp_path / "all") == read(source)
    assert main(["copy", str(source), "-o", str(tmp_path / "some"), "--complete"]) == 0
    assert read(tmp_path / "some") == read(source)[1:]
    with Store.open(source) as store, Store.open(tmp_path / "all") as copied:
        assert summarize(store).rows_stored == summarize(copied).rows_stored == 16


def test_records_of_pipeline_stages(
    tmp_path: Path, meta: StoreMeta, make_rows: MakeRows, make_record: MakeRecord
) -> None:
    rows = make_rows(8)
    for index, columns in enumerate(((0, 1), (2,))):
        part = Part("engine", index, 2, columns)
        with StoreWriter.open(tmp_path / "staged", meta, part=part) as writer:
            writer.append(rows[:, list(columns)].contiguous())
            writer.commit(
                [
                    replace(make_record(f"r{number}", range(4 * number, 4 * number + 4)), number=number)
                    for number in (0, 1)
                ]
            )
            if not index:
                first = StoreWriter.open(tmp_path / "staged", meta, part=part)  # the session lives on
    first.close()
    assert main(["copy", str(tmp_path / "staged"), "-o", str(tmp_path / "copy"), "--records", "1:"]) == 0
    with Store.open(tmp_path / "copy") as store:
        assert [record.request_id for record in store] == ["r1"]
        assert torch.equal(store[0].hidden_states, rows[4:])
        assert list(store.verify()) == []
        assert summarize(store).rows_stored == 8


def test_a_sample_is_the_same_requests_every_time(
    tmp_path: Path, meta: StoreMeta, make_rows: MakeRows, make_record: MakeRecord
) -> None:
    with StoreWriter.open(tmp_path / "store", meta) as writer:
        writer.append(make_rows(1))
        writer.commit([make_record(f"r{number}", [0]) for number in range(200)])
    found = {}
    for name, fraction in (("half", "0.5"), ("again", "0.5"), ("less", "0.25")):
        assert main(["copy", str(tmp_path / "store"), "-o", str(tmp_path / name), "--sample", fraction]) == 0
        with Store.open(tmp_path / name) as store:
            found[name] = {record.request_id for record in store}
    assert found["half"] == found["again"] > found["less"]
    assert 75 < len(found["half"]) < 125


@pytest.mark.parametrize("fraction", ["x", "", "1.5", "nan"])
def test_a_sample_that_is_no_fraction_is_refused(fraction: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["copy", "one", "-o", "two", "--sample", fraction])
    assert "argument --sample: must be " in capsys.readouterr().err


def test_what_cannot_be_copied_is_refused_and_leaves_nothing(
    fill: Fill, tmp_path: Path, make_meta: MakeMeta, capsys: pytest.CaptureFixture[str]
) -> None:
    one = fill("one")
    StoreWriter.open(tmp_path / "other", make_meta(model_fingerprint="beef")).close()
    before = sorted(tmp_path.iterdir())
    assert main(["copy", str(one), str(tmp_path / "other"), "-o", str(tmp_path / "new")]) == 1
    assert "other holds other rows than" in capsys.readouterr().err
    assert main(["copy", str(one), "-o", str(tmp_path / "new"), "--tag", "z"]) == 1
    assert "none of the 5 records is chosen" in capsys.readouterr().err
    assert main(["copy", str(one), "-o", str(one)]) == 1
    assert f"{one} is there and not an empty folder" in capsys.readouterr().err
    (tmp_path / "link").symlink_to(one)
    for inside in (one / "replica-x", one / "deep" / "replica-x", tmp_path / "link" / "replica-x"):
        assert main(["copy", str(one), "-o", str(inside)]) == 1
        assert f"{inside} would lie within {one}, which it is made from" in capsys.readouterr().err
    assert main(["copy", str(one), "-o", str(tmp_path)]) == 1
    assert f"{tmp_path} is there and not an empty folder" in capsys.readouterr().err
    (tmp_path / "link").unlink()
    shard = one / "shards" / "0001-00001.safetensors"
    os.truncate(shard, shard.stat().st_size - 1)
    assert main(["copy", str(one), "-o", str(tmp_path / "new")]) == 1
    assert f"{shard} is cut short: its records need {shard.stat().st_size + 1} bytes" in capsys.readouterr().err
    os.truncate(shard, 600)
    assert main(["copy", str(one), "-o", str(tmp_path / "new")]) == 1
    assert f"{shard} is cut short" in capsys.readouterr().err
    shard.unlink()
    assert main(["copy", str(one), "-o", str(tmp_path / "new")]) == 1
    assert "0001-00001.safetensors: No such file or directory" in capsys.readouterr().err
    assert sorted(tmp_path.iterdir()) == before
