"""What is written to a store is what is read from it."""

from __future__ import annotations

import multiprocessing
import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from vllm_overlay.store import IncompleteRecordError, Store, StoreError, StoreWriter
from vllm_overlay.store.float8 import pack_rows, unpack_rows


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_record_reads_back_in_every_dtype(dtype: str, store_path, make_meta, make_rows, make_record) -> None:
    meta = make_meta(dtype=dtype)
    rows = make_rows(5, meta.torch_dtype)
    mask = np.array([False, True, True, False, True])
    with StoreWriter.open(store_path, meta) as writer:
        assert writer.append(rows[:2]) == 0
        assert writer.append(rows[2:]) == 2
        assert torch.equal(writer.read_rows(1, 3), rows[1:4])
        writer.commit([make_record("a", range(5), num_prompt_tokens=3, tag="x", loss_mask=mask)])
    with Store.open(store_path) as store:
        assert store.meta == meta
        assert store.layer_ids == (2, 1, 6)
        record = store[0]
    assert record.hidden_states.dtype is meta.torch_dtype
    assert torch.equal(record.hidden_states, rows)
    assert record.token_ids.dtype is torch.int64 and record.token_ids.tolist() == [100, 101, 102, 103, 104]
    assert record.loss_mask is not None and record.loss_mask.dtype is torch.bool
    assert record.loss_mask.tolist() == mask.tolist()
    assert (record.request_id, record.num_prompt_tokens, record.complete) == ("a", 3, True)
    assert (record.finish_reason, record.tag, record.first_position) == ("length", "x", 0)


def test_a_window_says_where_it_begins(store_path, meta, make_rows, make_record) -> None:
    rows = make_rows(3)
    with StoreWriter.open(store_path, meta) as writer:
        writer.append(rows)
        writer.commit([make_record("w", range(3), first_position=12), make_record("h", [0, -1, 2], first_position=7)])
    with Store.open(store_path) as store:
        assert (store[0].first_position, store["w"].first_position) == (12, 12)
        assert torch.equal(store["w"].hidden_states, rows)
        with pytest.raises(IncompleteRecordError, match="positions 8 of 7-9 have no hidden states"):
            _ = store["h"].hidden_states


def test_loss_mask_may_be_unknown(store_path, meta, make_rows, make_record) -> None:
    with StoreWriter.open(store_path, meta) as writer:
        writer.append(make_rows(1))
        writer.commit([make_record("a", [0])])
    assert Store.open(store_path)[0].loss_mask is None


def test_several_extents_across_shards(store_path, meta, make_rows, make_record) -> None:
    rows = make_rows(10)
    with StoreWriter.open(store_path, meta, rows_per_shard=3) as writer:
        writer.append(rows[:4])
        writer.append(rows[4:])
        # A shared prefix that crosses a border, a jump forwards, one row on its own, a jump back.
        layout = [1, 2, 3, 7, 8, 9, 5, 0]
        writer.commit([make_record("a", layout), make_record("b", [1, 2, 3, 4])])
        assert torch.equal(writer.read_rows(2, 6), rows[2:8])
    store = Store.open(store_path)
    assert torch.equal(store["a"].hidden_states, rows[layout])
    assert torch.equal(store["b"].hidden_states, rows[1:5])
    files = sorted(path.name for path in (store_path / "shards").iterdir())
    assert files == [f"0001-{number:05d}.safetensors" for number in range(4)]


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
def test_rows_that_lie_by_themselves_come_in_their_order(
    dtype: str, store_path, make_meta, make_rows, make_record
) -> None:
    """As of a request that was decoded beside others, over shards of 5 rows, and with rows of a shared prefix."""
    meta = make_meta(dtype=dtype)
    rows = make_rows(40, torch.bfloat16)
    numbers = [33, 34, *range(0, 32, 3), 2, 2, 39]
    with StoreWriter.open(store_path, meta, rows_per_shard=5) as writer:
        stored = pack_rows(rows) if meta.is_packed else rows
        writer.append(stored)
        writer.commit([make_record("a", numbers)])
    with Store.open(store_path) as store:
        found = store["a"].hidden_states
    assert torch.equal(found, (unpack_rows(stored) if meta.is_packed else rows)[numbers])


def test_a_shard_that_lost_its_end_is_named_by_records_in_pieces(store_path, meta, make_rows, make_record) -> None:
    with StoreWriter.open(store_path, meta) as writer:
        writer.append(make_rows(6))
        writer.commit([make_record("a", [0, 2, 4]), make_record("b", [1, 3, 5])])
    [shard] = store_path.glob("shards/*.safetensors")
    with shard.open("r+b") as file:
        file.truncate(shard.stat().st_size - 1)
    with Store.open(store_path) as store:
        assert store["a"].hidden_states.shape == (3, 3, 8)
        with pytest.raises(StoreError, match=r"0001-00000.safetensors is cut short: row 5 is not there"):
            _ = store["b"].hidden_states


def test_one_extent_is_a_view_of_the_file_without_warning(store_path, meta, make_rows, make_record) -> None:
    with StoreWriter.open(store_path, meta) as writer:
        writer.append(make_rows(6))
        writer.commit([make_record("a", range(4)), make_record("b", range(2, 6)), make_record("c", [0, 5])])
    store = Store.open(store_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        a, b, c = (record.hidden_states for record in store)
    assert b.data_ptr() == a.data_ptr() + 2 * meta.row_bytes
    assert c.untyped_storage().data_ptr() != a.untyped_storage().data_ptr()


def test_writing_to_a_view_does_not_reach_the_disk(store_path, meta, make_rows, make_record) -> None:
    rows = make_rows(3)
    with StoreWriter.open(store_path, meta) as writer:
        writer.append(rows)
        writer.commit([make_record("a", range(3))])
    store = Store.open(store_path)
    store[0].hidden_states.zero_()
    assert store.check(0) is None
    assert torch.equal(Store.open(store_path)[0].hidden_states, rows)


def test_hole_makes_a_record_incomplete(store_path, meta, make_rows, make_record) -> None:
    with StoreWriter.open(store_path, meta) as writer:
        writer.append(make_rows(4))
        writer.commit([make_record("late", [-1, -1, 0, 1, -1, 2, 3])])
    record = Store.open(store_path)[0]
    assert not record.complete
    assert len(record.token_ids) == 7
    with pytest.raises(
        IncompleteRecordError, match=r"'late' of .*store is incomplete: positions 0-1, 4 of 0-6 have no"
    ):
        _ = record.hidden_states


def test_newest_record_of_a_request_wins(store_path, meta, make_rows, make_record) -> None:
    rows = make_rows(4)
    for number in range(2):
        with StoreWriter.open(store_path, meta) as writer:
            writer.append(rows[2 * number : 2 * number + 2])
            writer.commit([make_record("a", range(2), tag=f"run {number}"), make_record("b", [0])])
    store = Store.open(store_path)
    assert store["a"].tag == "run 1"
    assert torch.equal(store["a"].hidden_states, rows[2:])
    assert torch.equal(store[0].hidden_states, rows[:2])
    assert store.tags() == {"run 0", "run 1"}
    assert "a" in store and "c" not in store
    with pytest.raises(KeyError, match="no record of request 'c'"):
        store["c"]


def test_store_is_a_sequence_in_the_order_of_commits(store_path, meta, make_rows, make_record) -> None:
    """CASES.md 2: 40 records, each of its own length under its own id; ids sorted as text would put 10 before 2."""
    with StoreWriter.open(store_path, meta) as writer:
        writer.append(make_rows(40))
        writer.commit([make_record(f"request-{length}", range(length)) for length in range(1, 41)])
    store = Store.open(store_path)
    assert len(store) == 40
    assert [len(record.token_ids) for record in store] == list(range(1, 41))
    assert [record.request_id for record in store] == [f"request-{length}" for length in range(1, 41)]
    assert store[-1].request_id == "request-40"
    assert len(store[np.int64(4)].token_ids) == 5
    for outside in (40, -41):
        with pytest.raises(IndexError, match="which has 40"):
            store[outside]


def test_empty_store(store_path, meta) -> None:
    StoreWriter.open(store_path, meta).close()
    store = Store.open(store_path)
    assert len(store) == 0 and list(store) == [] and store.tags() == set()
    assert list((store_path / "shards").iterdir()) == []


def test_appending_no_rows_and_committing_no_records(store_path, meta, make_rows) -> None:
    with StoreWriter.open(store_path, meta) as writer:
        writer.append(make_rows(2))
        assert writer.append(make_rows(0)) == 2
        writer.commit([])
        assert writer.read_rows(2, 0).shape == (0, 3, 8)
    assert len(Store.open(store_path)) == 0


def test_tensors_outlive_the_store(store_path, meta, make_rows, make_record) -> None:
    rows = make_rows(2)
    with StoreWriter.open(store_path, meta) as writer:
        writer.append(rows)
        writer.commit([make_record("a", range(2))])
    with Store.open(store_path) as store:
        states = store[0].hidden_states
    del store
    assert torch.equal(states, rows)


def _send_sum(store: Store, results: Any) -> None:
    results.put(float(store[0].hidden_states.double().sum()))


def test_store_may_be_used_after_a_fork(store_path, meta, make_rows, make_record) -> None:
    rows = make_rows(2)
    with StoreWriter.open(store_path, meta) as writer:
        writer.append(rows)
        writer.commit([make_record("a", range(2))])
        store = Store.open(store_path)
        inherited = store.index
        context = multiprocessing.get_context("fork")
        results = context.SimpleQueue()
        child = context.Process(target=_send_sum, args=(store, results))
        child.start()
        assert results.get() == pytest.approx(float(rows.double().sum()))
        child.join()
        assert child.exitcode == 0
        store._pid = -1
        assert store.index is not inherited


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"complete": False}, "said to be incomplete, and 0 of 2 rows are missing"),
        ({"rows": np.array([0, -1])}, "said to be complete, and 1 of 2 rows are missing"),
        ({"rows": np.array([1, 2])}, r"rows 1..2, and this log has 2"),
        ({"rows": np.array([-2, 0])}, r"rows -2..0, and this log has 2"),
        ({"rows": np.array([0])}, "not one row a token"),
        ({"token_ids": np.array([1, 2], dtype=np.int32)}, "must be int64, not int32"),
        ({"num_prompt_tokens": 3}, "3 prompt tokens, of 2 tokens"),
        ({"first_position": -1}, "it begins at position -1"),
        ({"loss_mask": np.array([True])}, r"the loss mask must be bool \[2\], not bool \[1\]"),
        ({"token_ids": np.empty(0, dtype=np.int64), "rows": np.empty(0, dtype=np.int64)}, "not one row a token"),
    ],
)
def test_contradictory_record_is_refused_with_its_batch(
    changes: dict[str, Any], message: str, store_path, meta, make_rows, make_record
) -> None:
    with StoreWriter.open(store_path, meta) as writer:
        writer.append(make_rows(2))
        bad = replace(make_record("bad", range(2)), **changes)
        with pytest.raises(StoreError, match=f"record 'bad'.*{message}"):
            writer.commit([make_record("good", range(2)), bad])
        assert len(Store.open(store_path)) == 0


def test_rows_of_another_kind_are_refused(store_path, meta, make_rows) -> None:
    with StoreWriter.open(store_path, meta) as writer:
        with pytest.raises(
            StoreError, match=r"takes rows \[n, 3, 8\] of torch.float32, not \[1, 3, 8\] of torch.bfloat16"
        ):
            writer.append(make_rows(1, torch.bfloat16))
        with pytest.raises(StoreError, match=r"not \[1, 2, 8\] of"):
            writer.append(make_rows(1)[:, :2].contiguous())
        with pytest.raises(StoreError, match="must be contiguous on the CPU"):
            writer.append(make_rows(4)[::2])
        assert writer.num_rows == 0
        with pytest.raises(StoreError, match=r"rows 0\.\.0 were asked for, and this log has 0"):
            writer.read_rows(0, 1)
    with pytest.raises(StoreError, match=r"the writer of .*store is closed"):
        writer.append(make_rows(1))
