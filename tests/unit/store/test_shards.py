"""Shards are safetensors files that other programs can read, at every moment."""

from __future__ import annotations

import gc
import json
import os
import threading
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from vllm_overlay.store import Store, StoreWriter, files
from vllm_overlay.store import writer as writer_module


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_safetensors_reads_a_shard_from_its_creation_on(dtype: str, store_path, make_meta, make_rows) -> None:
    meta = make_meta(dtype=dtype)
    rows = make_rows(3, meta.torch_dtype)
    file = store_path / "shards" / "0001-00000.safetensors"
    with StoreWriter.open(store_path, meta, rows_per_shard=1000) as writer:
        writer.append(rows[:1])
        early = load_file(file)["hidden_states"]
        assert early.shape == (1000, 3, 8) and early.dtype is meta.torch_dtype
        assert torch.equal(early[:1], rows[:1]) and not early[1:].any()
        writer.append(rows[1:])
    assert torch.equal(load_file(file)["hidden_states"], rows)
    with safe_open(file, framework="pt") as opened:
        assert json.loads(opened.metadata()["layer_ids"]) == [2, 1, 6]
        assert opened.metadata()["format_version"] == "1"


def test_data_of_a_shard_start_on_8_bytes(store_path, make_meta, make_rows) -> None:
    for layers in ((0, 1, 2), (0, 1, 3, 5), (6,)):
        meta = make_meta(layer_ids=layers, model_fingerprint=str(layers))
        with StoreWriter.open(store_path / str(len(layers)), meta) as writer:
            writer.append(torch.ones(1, len(layers), 8))
        content = next((store_path / str(len(layers)) / "shards").iterdir()).read_bytes()
        assert int.from_bytes(content[:8], "little") % 8 == 0
        assert len(content) == 8 + int.from_bytes(content[:8], "little") + meta.row_bytes


def test_space_is_taken_for_written_rows_only(store_path, meta, make_rows, make_record) -> None:
    with StoreWriter.open(store_path, meta) as writer:
        writer.append(make_rows(4))
        status = (store_path / "shards" / "0001-00000.safetensors").stat()
        assert status.st_size > 0.9 * 2**26
        assert status.st_blocks * 512 < 2**20


def test_an_append_writes_into_its_shards_at_the_same_time(store_path, meta, make_rows, monkeypatch) -> None:
    """One after the other, the first would wait for the second until the barrier breaks."""
    rows, write, together = make_rows(6), os.pwrite, threading.Barrier(2, timeout=20)

    def wait_for_the_other(fd: int, data: memoryview, offset: int) -> int:
        if len(data) == 3 * meta.row_bytes:
            together.wait()
        return write(fd, data, offset)

    with StoreWriter.open(store_path, meta, rows_per_shard=3) as writer:
        monkeypatch.setattr(os, "pwrite", wait_for_the_other)
        writer.append(rows)
        monkeypatch.undo()
        assert torch.equal(writer.read_rows(0, 6), rows)


def test_shards_that_no_commit_closes_are_closed_all_the_same(
    store_path, meta, make_rows, make_record, open_shards, monkeypatch
) -> None:
    monkeypatch.setattr(writer_module, "MOST_OPEN", 10)
    rows = make_rows(50)
    with StoreWriter.open(store_path, meta, rows_per_shard=1) as writer:
        for number in range(50):
            writer.append(rows[number : number + 1])
            assert open_shards() <= 12
        writer.commit([make_record("a", range(50))])
    assert torch.equal(Store.open(store_path)[0].hidden_states, rows)


def test_a_reader_maps_a_limited_number_of_shards(store_path, meta, make_rows, make_record, monkeypatch) -> None:
    """A process may hold 65,530 maps unless it is told otherwise."""
    monkeypatch.setattr(files, "MOST_MAPS", 3)
    rows = make_rows(20)
    with StoreWriter.open(store_path, meta, rows_per_shard=2) as writer:
        writer.append(rows)
        writer.commit([make_record(str(number), range(number, number + 1)) for number in range(20)])
    with Store.open(store_path) as store:
        kept = [record.hidden_states for record in store]
        maps = Path("/proc/self/maps").read_text().count(f"{store_path}/shards/")
        assert torch.equal(torch.cat(kept), rows)
        assert maps == 10
        del kept
        gc.collect()
        assert Path("/proc/self/maps").read_text().count(f"{store_path}/shards/") == 3


def test_long_logs_keep_few_files_open(store_path, meta, make_rows, make_record, open_shards) -> None:
    """A long run makes more shards than a process may have files open, and so does a reader of it."""
    rows = make_rows(100)
    with StoreWriter.open(store_path, meta, rows_per_shard=1) as writer:
        for number in range(100):
            writer.append(rows[number : number + 1])
            if number % 10 == 9:
                assert open_shards() == 10
                writer.commit([])
                assert open_shards() == 0
        writer.commit([make_record("a", range(100))])
        states = Store.open(store_path)[0].hidden_states
        assert torch.equal(states, rows)
        assert open_shards() == 0


def test_nothing_is_being_written_when_a_close_begins_to_finish_the_log(store_path, meta, monkeypatch) -> None:
    """An append that a signal interrupted has left writes behind, to files that are then closed."""
    writer = StoreWriter.open(store_path, meta)
    threads, finish = list(writer._lanes._threads), writer._rows.finish
    alive = []
    monkeypatch.setattr(writer._rows, "finish", lambda: alive.extend(t for t in threads if t.is_alive()) or finish())
    writer.close()
    assert threads and alive == []
