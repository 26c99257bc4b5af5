"""Rows that nobody needs any more: which shards go and when, what readers find, and a crash between index and files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from tests.unit.store.conftest import MakeMeta, MakeRecord, MakeRows
from vllm_overlay.store import IncompleteRecordError, Part, Store, StoreError, StoreMeta, StoreWriter, summarize
from vllm_overlay.store.retire import Retired, Retirer

ROWS, ROW_BYTES = 10, 96  # rows of a shard
SHARD = ROWS * ROW_BYTES


def shards(folder: Path) -> list[str]:
    return sorted(path.name.removesuffix(".safetensors") for path in (folder / "shards").glob("*.safetensors"))


def write(writer: StoreWriter, rows: torch.Tensor, make_record: MakeRecord, *, each: int = 5) -> None:
    """Records r0, r1, ... of `each` rows."""
    first = writer.append(rows)
    for start in range(first, first + len(rows), each):
        writer.commit([make_record(f"r{start // each}", range(start, start + each))])


@pytest.fixture
def writer(tmp_path: Path, meta: StoreMeta, make_rows: MakeRows, make_record: MakeRecord) -> StoreWriter:
    """Live, with records r0..r6 in shards 0..3, of which the last is half full."""
    writer = StoreWriter.open(tmp_path / "s", meta, rows_per_shard=ROWS)
    write(writer, make_rows(35), make_record)
    return writer


def test_old_shards_go_and_readers_find_the_store_whole(
    tmp_path: Path, writer: StoreWriter, make_rows: MakeRows, make_record: MakeRecord
) -> None:
    folder = tmp_path / "s"
    retirer = Retirer(folder)
    assert retirer.retire(7, keep_bytes=2 * SHARD) == Retired(2, 2 * SHARD)
    assert shards(folder) == ["0001-00002", "0001-00003"]
    write(writer, make_rows(35, seed=1), make_record)
    for number in range(2):  # live, and closed
        with Store.open(folder) as store:
            assert list(store.verify()) == []
            assert store.complete_numbers() == list(range(4, 14))
            assert torch.equal(store["r5"].hidden_states, make_rows(35)[25:30])
            assert torch.equal(store["r13"].hidden_states, make_rows(35, seed=1)[30:])
            assert store["r0"].token_ids.tolist() == list(range(100, 105))
            with pytest.raises(IncompleteRecordError, match="positions 0-4 of 0-4"):
                _ = store["r0"].hidden_states
        if number == 0:
            writer.close()
    with Store.open(folder) as store:
        named = {row[0] for row in store.index.execute("SELECT number FROM shards")}
        assert named == set(range(2, 7)) == {int(name[-5:]) for name in shards(folder)}


def test_only_what_the_caller_is_done_with_goes(tmp_path: Path, writer: StoreWriter) -> None:
    retirer = Retirer(tmp_path / "s")
    assert retirer.retire(1, keep_bytes=0).files == 0  # shard 0 has rows of record 2, too
    assert retirer.retire(5, keep_bytes=0).files == 2
    assert shards(tmp_path / "s") == ["0001-00002", "0001-00003"]
    assert retirer.retire(7, keep_bytes=0).files == 1  # the writer is not done with the last one
    writer.close()
    assert retirer.retire(7, keep_bytes=0).files == 1
    assert shards(tmp_path / "s") == []


def test_rows_in_no_record_yet_stay_while_nothing_is_done_with(
    tmp_path: Path, meta: StoreMeta, make_rows: MakeRows, make_record: MakeRecord
) -> None:
    """The first request may run still when the second one's record is there."""
    with StoreWriter.open(tmp_path / "s", meta, rows_per_shard=ROWS) as writer:
        writer.append(make_rows(25))
        writer.commit([make_record("second", range(20, 25))])
        retirer = Retirer(tmp_path / "s")
        assert retirer.retire(0, keep_bytes=0).files == 0
        assert retirer.retire(1, keep_bytes=0).files == 2


def test_a_prefix_in_use_stays_and_one_that_is_gone_is_missing(
    tmp_path: Path, writer: StoreWriter, make_rows: MakeRows, make_record: MakeRecord
) -> None:
    """What was used last goes last, not what was written last."""
    folder = tmp_path / "s"
    writer.commit([make_record("shared", [0, 1, 2, 3, 30, 31])])
    retirer = Retirer(folder)
    assert retirer.retire(8, keep_bytes=2 * SHARD).files == 2
    assert shards(folder) == ["0001-00000", "0001-00003"]
    writer.commit([make_record("late", [10, 11, 34, 34])])
    assert retirer.update() == 9
    with Store.open(folder) as store:
        assert torch.equal(store["shared"].hidden_states, make_rows(35)[[0, 1, 2, 3, 30, 31]])
        with pytest.raises(IncompleteRecordError, match="positions 0-1 of 0-3"):
            _ = store["late"].hidden_states
        assert list(store.verify()) == []
    writer.close()


@pytest.mark.parametrize(
    ("live", "complete", "left"), [(True, [6], ["0001-00003"]), (False, [], [])], ids=["live", "closed"]
)
def test_a_crash_before_the_files_are_removed(
    tmp_path: Path,
    writer: StoreWriter,
    monkeypatch: pytest.MonkeyPatch,
    live: bool,
    complete: list[int],
    left: list[str],
) -> None:
    folder = tmp_path / "s"
    if not live:
        writer.close()

    def die(self: Path, missing_ok: bool = False) -> None:
        raise OSError("killed")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", die)
        with pytest.raises(StoreError, match="killed"):
            Retirer(folder).retire(7, keep_bytes=0)
    assert len(shards(folder)) == 4
    with Store.open(folder) as store:
        assert list(store.verify()) == [] and store.complete_numbers() == complete
    Retirer(folder)
    assert shards(folder) == left
    writer.close()


def test_a_writer_that_died_is_taken_over(
    tmp_path: Path, meta: StoreMeta, make_rows: MakeRows, make_record: MakeRecord
) -> None:
    folder = tmp_path / "s"
    child = os.fork()
    if child == 0:
        write(StoreWriter.open(folder, meta, rows_per_shard=ROWS), make_rows(35), make_record)
        os._exit(0)
    os.waitpid(child, 0)
    assert Retirer(folder).retire(7, keep_bytes=SHARD).files == 3
    with StoreWriter.open(folder, meta) as writer:
        write(writer, make_rows(5, seed=1), make_record)
    with Store.open(folder) as store:
        assert list(store.verify()) == [] and store.complete_numbers() == [6, 7]
        assert summarize(store).rows_dropped == 0  # those that were retired are not


def test_stores_that_cannot_be_retired_are_refused(tmp_path: Path, make_meta: MakeMeta) -> None:
    with pytest.raises(StoreError, match="is not a store"):
        Retirer(tmp_path)
    with StoreWriter.open(tmp_path / "p", make_meta(), part=Part("s", 0, 2, (0,))):
        pass
    with pytest.raises(StoreError, match="is written by pipeline stages"):
        Retirer(tmp_path / "p")
