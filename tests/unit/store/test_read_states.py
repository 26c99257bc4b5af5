"""Many records read at once are those that are read one by one."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from vllm_overlay.store import IncompleteRecordError, Part, Store, StoreMeta, StoreWriter
from vllm_overlay.store.float8 import pack_rows

from .conftest import MakeMeta, MakeRecord, MakeRows

NUMBERS = (3, 0, 2, 1, 0)
LENGTHS = (2, 5, 1, 4, 3)  # some records are cut


def read_at_once(store: Store, numbers: Sequence[int], lengths: Sequence[int]) -> torch.Tensor:
    """In places that are not in the order of the records."""
    out = torch.zeros(sum(lengths) + 1, *store.meta.row_shape, dtype=store.meta.torch_dtype)
    starts = np.cumsum(lengths) - lengths
    order = [2, 0, 4, 3, 1]
    store.read_states(
        [numbers[i] for i in order], [slice(int(starts[i]), int(starts[i]) + lengths[i]) for i in order], out
    )
    assert not out[-1].any()  # nothing is written beside the places
    return out[:-1]


def read_one_by_one(store: Store, numbers: Sequence[int], lengths: Sequence[int]) -> torch.Tensor:
    return torch.cat([store[number].hidden_states[:length] for number, length in zip(numbers, lengths, strict=True)])


def write_in_pieces(path: Path, meta: StoreMeta, rows: torch.Tensor, make_record: MakeRecord) -> None:
    """Four records side by side over shards of 5 rows: whole, in pieces, backwards, with a shared prefix."""
    with StoreWriter.open(path, meta, rows_per_shard=5) as writer:
        writer.append(rows)
        layouts = [[0, 2, 4, 6, 8], [1, 3, 5, 7], [12, 11, 10], [0, 2, 9, 13]]
        writer.commit([make_record(f"r{number}", layout) for number, layout in enumerate(layouts)])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn"])
def test_in_every_dtype(
    dtype: str, store_path: Path, make_meta: MakeMeta, make_rows: MakeRows, make_record: MakeRecord
) -> None:
    meta = make_meta(dtype=dtype)
    rows = make_rows(14, meta.torch_dtype)
    write_in_pieces(store_path, meta, pack_rows(rows) if meta.is_packed else rows, make_record)
    with Store.open(store_path) as store:
        found = read_at_once(store, NUMBERS, LENGTHS)
        assert torch.equal(found, read_one_by_one(store, NUMBERS, LENGTHS))
        if not meta.is_packed:
            assert torch.equal(found[2:7], rows[[0, 2, 4, 6, 8]])


def test_of_replicas(store_path: Path, make_meta: MakeMeta, make_rows: MakeRows, make_record: MakeRecord) -> None:
    for seed, path in enumerate((store_path / "replica-0-of-2", store_path / "replica-1-of-2")):
        with StoreWriter.open(path, make_meta()) as writer:
            writer.append(make_rows(10, seed=seed))
            writer.commit([make_record("a", [1, 3, 5, 7, 9]), make_record("b", [0, 2, 4, 6, 8])])
    with Store.open(store_path) as store:
        found = read_at_once(store, NUMBERS, LENGTHS)
        assert torch.equal(found, read_one_by_one(store, NUMBERS, LENGTHS))
        assert torch.equal(found[:2], make_rows(10, seed=1)[[0, 2]])


def test_of_pipeline_stages(store_path: Path, meta: StoreMeta, make_rows: MakeRows, make_record: MakeRecord) -> None:
    states = make_rows(20)
    parts = Part("engine", 0, 2, (0, 1)), Part("engine", 1, 2, (2,))
    records = [replace(make_record(f"r{number}", range(number, 20, 4)), number=number) for number in range(4)]
    with ExitStack() as stack:
        writers = [stack.enter_context(StoreWriter.open(store_path, meta, part=part)) for part in parts]
        for writer, part in zip(writers, parts, strict=True):
            writer.append(states[:, list(part.columns)].contiguous())
            writer.commit(records)
    with Store.open(store_path) as store:
        found = read_at_once(store, NUMBERS, LENGTHS)
        assert torch.equal(found, read_one_by_one(store, NUMBERS, LENGTHS))
        assert torch.equal(found[:2], states[[3, 7]])


def test_an_incomplete_one_among_them_is_named(
    store_path: Path, meta: StoreMeta, make_rows: MakeRows, make_record: MakeRecord
) -> None:
    with StoreWriter.open(store_path, meta) as writer:
        writer.append(make_rows(4))
        writer.commit([make_record("whole", [0, 2]), make_record("holed", [1, -1, 3])])
    with Store.open(store_path) as store:
        out = torch.zeros(5, 3, 8)
        with pytest.raises(IncompleteRecordError, match=r"record 'holed' .* positions 1 of 0-2 have no hidden states"):
            store.read_states([0, 1], [slice(0, 2), slice(2, 5)], out)
        for number in (2, 2**63):
            with pytest.raises(IndexError, match=rf"record {number} of .*, which has 2"):
                store.read_states([0, number], [slice(0, 2), slice(2, 5)], out)


def test_what_does_not_fit_is_refused(
    store_path: Path, make_meta: MakeMeta, make_rows: MakeRows, make_record: MakeRecord
) -> None:
    with StoreWriter.open(store_path, make_meta(dtype="bfloat16")) as writer:
        writer.append(make_rows(4, torch.bfloat16))
        writer.commit([make_record("a", [0, 2]), make_record("b", [1, 2, 3])])
    with Store.open(store_path) as store:
        out = torch.zeros(5, 3, 8, dtype=torch.bfloat16)
        for misfit in (out.float(), out[:, :2], out.transpose(1, 2), torch.zeros(5, 8, 3).bfloat16().transpose(1, 2)):
            with pytest.raises(ValueError, match=r"out is .*, where the states of .* want a contiguous torch.bfloat16"):
                store.read_states([0], [slice(0, 2)], misfit)
        for place in (slice(0, 3), slice(2, 2), slice(4, 6), slice(5, 6), slice(-2, 0), slice(0, 4, 2)):
            with pytest.raises(
                ValueError, match=r"record 0 has 2 tokens, and .* of out, which has 5, is no place for it"
            ):
                store.read_states([0], [place], out)
        assert not out.any()


def test_of_a_store_that_grows(store_path: Path, meta: StoreMeta, make_rows: MakeRows, make_record: MakeRecord) -> None:
    rows = make_rows(12)
    with StoreWriter.open(store_path, meta, rows_per_shard=4) as writer, Store.open(store_path) as store:
        for number in range(2):
            writer.append(rows[6 * number : 6 * number + 6])
            writer.commit([make_record(f"r{number}", range(6 * number, 6 * number + 6, 2))])
            out = torch.zeros(3, 3, 8)
            store.read_states([number], [slice(0, 3)], out)
            assert torch.equal(out, rows[6 * number : 6 * number + 6 : 2])


def test_a_thread_that_is_late_does_not_take_back_what_another_has_learnt(
    store_path: Path, meta: StoreMeta, make_rows: MakeRows, make_record: MakeRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both read the shards of a log that grows; the one that read first stores its list last."""
    rows, out = make_rows(8), torch.zeros(2, 3, 8)
    with StoreWriter.open(store_path, meta, rows_per_shard=4) as writer, Store.open(store_path) as store:
        writer.append(rows[:4])
        writer.commit([make_record("early", [0, 2])])
        [log] = [log for log, _ in store.index.read_lone_parts([1]).values()]
        early = store.index.read_shards(log)
        writer.append(rows[4:])
        writer.commit([make_record("late", [5, 7])])
        late = store[1]  # has learnt the second shard
        monkeypatch.setattr(store.index, "read_shards", lambda log: early)
        store._rows.learn(log, store.index)
        store.read_states([1], [slice(0, 2)], out)
        assert torch.equal(out, rows[[5, 7]]) and torch.equal(late.hidden_states, rows[[5, 7]])
