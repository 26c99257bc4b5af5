"""Any layout of rows reads back as the same selection from a plain array."""

from __future__ import annotations

import tempfile
from itertools import pairwise

import numpy as np
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from vllm_overlay.store import PendingRecord, Store, StoreMeta, StoreWriter
from vllm_overlay.store.extents import find_extents, find_holes, merge_extents

META = StoreMeta((0, 2), 3, "float32", 2, "m", "f", "0", "V1")

layouts = st.lists(st.integers(-1, 19), min_size=1, max_size=30)
# Runs of consecutive rows, which single numbers drawn at random hardly ever make.
runs = st.lists(st.tuples(st.integers(-1, 19), st.integers(1, 8)), min_size=1, max_size=5).map(
    lambda pairs: [(start + step) % 20 if start >= 0 else -1 for start, count in pairs for step in range(count)]
)


@settings(max_examples=25, deadline=None)
@given(
    cuts=st.sets(st.integers(1, 19)),
    rows_per_shard=st.integers(1, 25),
    batches=st.lists(st.lists(layouts | runs, max_size=3), max_size=4),
)
def test_store_reads_back_like_an_array(cuts: set[int], rows_per_shard: int, batches: list[list[list[int]]]) -> None:
    reference = np.random.default_rng(7).standard_normal((20, 2, 3)).astype(np.float32)
    written = []
    with tempfile.TemporaryDirectory() as folder:
        with StoreWriter.open(folder, META, rows_per_shard) as writer:
            for part in np.split(reference, sorted(cuts)):
                writer.append(torch.from_numpy(part.copy()))
            for batch in batches:
                records = []
                for rows in batch:
                    tokens = np.arange(len(rows), dtype=np.int64) + 1000 * len(written)
                    written.append((tokens, rows))
                    records.append(
                        PendingRecord(str(len(written)), tokens, np.array(rows), 0, -1 not in rows, "stop", None, None)
                    )
                writer.commit(records)
        with Store.open(folder) as store:
            assert len(store) == len(written)
            for record, (tokens, rows) in zip(store, written, strict=True):
                assert record.token_ids.tolist() == tokens.tolist()
                assert record.complete == (-1 not in rows)
                if record.complete:
                    np.testing.assert_array_equal(record.hidden_states.numpy(), reference[rows])
            assert list(store.verify()) == []


@given(rows=layouts | runs)
@example(rows=[-1, 0, 1])
def test_extents_spell_the_rows_in_the_fewest_runs(rows: list[int]) -> None:
    extents = find_extents(np.array(rows))
    spelt = [start + step if start >= 0 else -1 for start, count in extents.tolist() for step in range(count)]
    assert spelt == rows
    breaks = sum(not (b == a + 1 if a >= 0 and b >= 0 else a == b == -1) for a, b in pairwise(rows))
    assert len(extents) == breaks + 1
    holes = [position for first, last in find_holes(extents) for position in range(first, last + 1)]
    assert holes == [position for position, row in enumerate(rows) if row == -1]


@given(layouts=st.lists(layouts | runs, max_size=5))
def test_merged_extents_hold_each_row_once(layouts: list[list[int]]) -> None:
    merged = merge_extents(find_extents(np.array(rows)) for rows in layouts)
    found = [start + step for start, count in merged.tolist() for step in range(count)]
    assert found == sorted({row for rows in layouts for row in rows} - {-1})
