"""Damage on disk is found, and named."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path

import pytest

from vllm_overlay.store import Store, StoreError, StoreWriter


@pytest.fixture
def damaged(store_path, meta, make_rows, make_record) -> Path:
    """Three records in shards of 4 rows; the second one's rows are 3..6."""
    with StoreWriter.open(store_path, meta, rows_per_shard=4) as writer:
        writer.append(make_rows(9))
        writer.commit([make_record("a", range(3)), make_record("b", range(3, 7)), make_record("c", [-1, 7, 8])])
    assert list(Store.open(store_path).verify()) == []
    return store_path


def flip(path: Path, offset: int) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= 1
    path.write_bytes(content)


def test_flipped_bit_of_a_row_names_the_record(damaged: Path, meta) -> None:
    shard = damaged / "shards" / "0001-00001.safetensors"
    flip(shard, shard.stat().st_size - 4 * meta.row_bytes + 2 * meta.row_bytes + 5)
    (found,) = Store.open(damaged).verify()
    assert (found.index, found.request_id) == (1, "b")
    assert found.rows == ("shards/0001-00000.safetensors 3..3", "shards/0001-00001.safetensors 0..2")
    assert "checksum" in found.problem and "record 1 ('b')" in str(found)


def test_changed_token_is_found(damaged: Path) -> None:
    index = (damaged / "index.sqlite").read_bytes()
    token_ids = b"".join(token.to_bytes(8, "little") for token in (100, 101, 102, 103))
    assert index.count(token_ids) == 1
    flip(damaged / "index.sqlite", index.index(token_ids))
    assert [damage.index for damage in Store.open(damaged).verify()] == [1]


def test_rows_that_are_in_no_shard_are_found(damaged: Path) -> None:
    with sqlite3.connect(damaged / "index.sqlite") as connection:
        connection.execute("DELETE FROM shards WHERE number > 0")
    connection.close()
    store = Store.open(damaged)
    problems = {damage.request_id: (damage.problem, damage.rows) for damage in store.verify()}
    assert list(problems) == ["b", "c"]
    assert problems["c"] == (f"rows 7..8 of log 1 are in no shard of {damaged}", ("log 1 7..8",))
    with pytest.raises(StoreError, match=r"rows 4\.\.6 of log 1 are in no shard"):
        _ = store["b"].hidden_states


def test_missing_and_short_shards_are_found(damaged: Path, meta) -> None:
    shards = damaged / "shards"
    os.truncate(shards / "0001-00002.safetensors", (shards / "0001-00002.safetensors").stat().st_size - 1)
    (shards / "0001-00000.safetensors").unlink()
    store = Store.open(damaged)
    problems = {damage.request_id: damage.problem for damage in store.verify()}
    assert list(problems) == ["a", "b", "c"]
    assert "0001-00000.safetensors: No such file" in problems["a"]
    assert "0001-00002.safetensors is cut short" in problems["c"]
    with pytest.raises(StoreError, match=r"cannot open .*0001-00000.safetensors: No such file"):
        _ = store["a"].hidden_states


@pytest.mark.parametrize("left", [8, -2 * 96])
def test_reading_a_short_shard_is_an_error_and_not_a_short_record(left: int, damaged: Path) -> None:
    """Record b needs 3 of the shard's 4 rows: with two rows cut off, one of them is gone."""
    shard = damaged / "shards" / "0001-00001.safetensors"
    os.truncate(shard, left if left > 0 else shard.stat().st_size + left)
    with pytest.raises(StoreError, match=r"0001-00001\.safetensors is cut short"):
        _ = Store.open(damaged)["b"].hidden_states
