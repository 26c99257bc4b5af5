"""Records that pipeline stages write in parts, each into its own log."""

from __future__ import annotations

import logging
import os
import signal
import sqlite3
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tests.unit.store.conftest import MakeRecord
from vllm_overlay.store import Part, PendingRecord, Store, StoreError, StoreMeta, StoreWriter, summarize

# Of the columns (2, 1, 6), the first stage computes layers 2 and 1 and the second layer 6.
FIRST, SECOND = Part("engine", 0, 2, (0, 1)), Part("engine", 1, 2, (2,))


def make_states(tokens: int, seed: int) -> torch.Tensor:
    return torch.randn(tokens, 3, 8, generator=torch.Generator().manual_seed(seed))


def write(writer: StoreWriter, part: Part, states: torch.Tensor) -> NDArray[np.int64]:
    """Row numbers, int64 `[tokens]`."""
    first = writer.append(states[:, list(part.columns)].contiguous())
    return np.arange(first, first + len(states))


def test_a_record_exists_when_its_last_part_does(tmp_path: Path, meta: StoreMeta, make_record: MakeRecord) -> None:
    states = [make_states(5, seed=1), make_states(3, seed=2)]
    with (
        StoreWriter.open(tmp_path, meta, part=FIRST) as first,
        StoreWriter.open(tmp_path, meta, part=SECOND) as second,
        Store.open(tmp_path) as store,
    ):
        for writer, part, order in ((first, FIRST, (0, 1)), (second, SECOND, (1, 0))):
            for number in order:  # each stage commits in an order of its own
                rows = write(writer, part, states[number])
                before = len(store)
                writer.commit([replace(make_record(f"r{number}", rows), number=number, first_position=3 * number)])
                assert len(store) == before + (part is SECOND)
    with Store.open(tmp_path) as store:
        assert store.layer_ids == (2, 1, 6)
        assert [record.request_id for record in store] == ["r1", "r0"]
        for number in range(2):
            assert torch.equal(store[f"r{number}"].hidden_states, states[number])
            assert store[f"r{number}"].first_position == 3 * number
        assert list(store.verify()) == []
        summary = summarize(store)
        assert (summary.records, summary.logs, summary.rows_stored, summary.rows_in_records) == (2, 2, 16, 16)


def test_a_hole_in_one_part_makes_the_record_incomplete(
    tmp_path: Path, meta: StoreMeta, make_record: MakeRecord
) -> None:
    states = make_states(4, seed=3)
    with (
        StoreWriter.open(tmp_path, meta, part=FIRST) as first,
        StoreWriter.open(tmp_path, meta, part=SECOND) as second,
    ):
        first.commit([make_record("r", write(first, FIRST, states))])
        rows = write(second, SECOND, states)
        rows[1] = -1
        second.commit([make_record("r", rows)])
    with Store.open(tmp_path) as store:
        assert not store[0].complete
        with pytest.raises(StoreError, match="positions 1 of 0-3 have no hidden states"):
            _ = store[0].hidden_states


def test_stages_that_saw_different_tokens_make_no_record(
    tmp_path: Path, meta: StoreMeta, make_record: MakeRecord
) -> None:
    states = make_states(4, seed=4)
    with (
        StoreWriter.open(tmp_path, meta, part=FIRST) as first,
        StoreWriter.open(tmp_path, meta, part=SECOND) as second,
    ):
        first.commit([make_record("r", write(first, FIRST, states))])
        other = make_record("r", write(second, SECOND, states))
        other.token_ids[2] += 1
        with pytest.raises(StoreError, match=r"record 'r': the 2 pipeline stages .* saw different tokens"):
            second.commit([other])
        with Store.open(tmp_path) as store:
            assert len(store) == 0


@pytest.mark.parametrize("log", [1, 2])
def test_a_flipped_byte_is_found_in_whichever_part(
    tmp_path: Path, meta: StoreMeta, make_record: MakeRecord, log: int
) -> None:
    states = make_states(4, seed=5)
    with (
        StoreWriter.open(tmp_path, meta, part=FIRST) as first,
        StoreWriter.open(tmp_path, meta, part=SECOND) as second,
    ):
        for writer, part in ((first, FIRST), (second, SECOND)):
            writer.commit([make_record("r", write(writer, part, states))])
    shard = tmp_path / "shards" / f"{log:04d}-00000.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    with Store.open(tmp_path) as store:
        (damage,) = store.verify()
        assert "expected" in damage.problem
        assert any(shard.name in rows for rows in damage.rows)


def write_part_and_die(folder: Path, meta: StoreMeta, record: PendingRecord, states: torch.Tensor) -> None:
    """In a process of its own, as the first stage."""
    pid = os.fork()
    if pid:
        os.waitpid(pid, 0)
        return
    writer = StoreWriter.open(folder, meta, part=FIRST)
    writer.append(states[:, [0, 1]].contiguous())
    writer.commit([record])
    os.kill(os.getpid(), signal.SIGKILL)


def test_rows_of_a_dead_stage_are_kept_while_another_stage_may_finish_the_record(
    tmp_path: Path, meta: StoreMeta, make_record: MakeRecord, caplog: pytest.LogCaptureFixture
) -> None:
    states = make_states(4, seed=7)
    with StoreWriter.open(tmp_path, meta, part=SECOND) as second:
        write_part_and_die(tmp_path, meta, make_record("r", range(4)), states)
        StoreWriter.open(tmp_path, meta).close()
        assert "0 of its 4 rows are in no record and were dropped" in caplog.text
        second.commit([make_record("r", write(second, SECOND, states))])
    with Store.open(tmp_path) as store:
        assert torch.equal(store["r"].hidden_states, states)
        assert list(store.verify()) == []


def test_rows_of_stages_that_are_all_dead_are_dropped(
    tmp_path: Path, meta: StoreMeta, make_record: MakeRecord, caplog: pytest.LogCaptureFixture
) -> None:
    write_part_and_die(tmp_path, meta, make_record("r", range(4)), make_states(4, seed=8))
    StoreWriter.open(tmp_path, meta).close()
    assert "1 requests were dropped: not every pipeline stage had written them" in caplog.text
    assert "4 of its 4 rows are in no record and were dropped" in caplog.text
    assert list((tmp_path / "shards").iterdir()) == []


def test_parts_whose_others_never_came_are_dropped_and_said(
    tmp_path: Path, meta: StoreMeta, make_record: MakeRecord, caplog: pytest.LogCaptureFixture
) -> None:
    with StoreWriter.open(tmp_path, meta, part=FIRST) as first:
        first.commit([make_record("r", write(first, FIRST, make_states(4, seed=6)))])
    with caplog.at_level(logging.WARNING):
        StoreWriter.open(tmp_path, meta, part=replace(FIRST, session="another engine")).close()
    assert "1 requests were dropped: not every pipeline stage had written them" in caplog.text
    connection = sqlite3.connect(tmp_path / "index.sqlite")
    assert connection.execute("SELECT count(*) FROM parts").fetchall() == [(0,)]
    connection.close()
