"""Several processes at one store, and processes that die."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from vllm_overlay.store import Store, StoreError, StoreWriter, summarize

# argv: store, name of the requests, records, "stay" or "close". Row r of a log holds the number of its record
# everywhere; a record is two rows.
WRITE = """
import sys, time
import numpy as np
import torch
from vllm_overlay.store import PendingRecord, StoreMeta, StoreWriter

path, name, records, end = sys.argv[1:]
meta = StoreMeta((2, 1, 6), 8, "float32", 6, "tiny-llama", "f00d", "0.32.0", "V2")
writer = StoreWriter.open(path, meta, rows_per_shard=5)
for number in range(int(records)):
    first = writer.append(torch.full((2, 3, 8), float(number + 1)))
    tokens = np.array([number, number])
    rows = np.array([first, first + 1])
    writer.commit([PendingRecord(f"{name}-{number}", tokens, rows, 1, True, "stop", None, None)])
if end == "close":
    writer.close()
    sys.exit()
writer.append(torch.full((9, 3, 8), 99.0))
print("ready", flush=True)
time.sleep(60)
"""


def start(store: Path, name: str, records: int, end: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", WRITE, str(store), name, str(records), end]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def check_records(store: Store, count: int) -> None:
    for number in range(count):
        record = store[number]
        value = float(record.request_id.split("-")[1]) + 1
        assert torch.equal(record.hidden_states, torch.full((2, 3, 8), value)), record


def test_two_writers_and_a_reader_at_once(store_path, meta) -> None:
    StoreWriter.open(store_path, meta).close()
    store = Store.open(store_path)
    writers = [start(store_path, name, 20, "close") for name in ("left", "right")]
    seen = set()
    while any(writer.poll() is None for writer in writers):
        seen.add(len(store))
        check_records(store, len(store))
    assert [writer.wait() for writer in writers] == [0, 0]
    assert len(seen) > 2, "the reader was to see the store grow"
    assert len(store) == 40
    check_records(store, 40)
    for name in ("left", "right"):
        own = [record.request_id for record in store if record.request_id.startswith(name)]
        assert own == [f"{name}-{number}" for number in range(20)]
    assert list(store.verify()) == []


def test_killed_writer_loses_only_what_it_had_not_committed(store_path, meta, make_rows, make_record, caplog) -> None:
    writer = start(store_path, "dead", 3, "stay")
    assert writer.stdout is not None and writer.stdout.readline() == "ready\n"
    with StoreWriter.open(store_path, meta):
        assert caplog.text == "", "a living writer is left alone"
    writer.send_signal(signal.SIGKILL)
    writer.wait()
    writer.stdout.close()

    with Store.open(store_path) as before:
        check_records(before, 3)
        view = before[2].hidden_states
        with StoreWriter.open(store_path, meta) as after:
            (message,) = caplog.messages
            assert message == (
                f"log 1 of {store_path} was not closed cleanly (process {writer.pid} is gone): "
                "9 of its 15 rows are in no record and were dropped"
            )
            after.append(make_rows(2))
            after.commit([make_record("new-0", range(2))])
        assert torch.equal(view, torch.full((2, 3, 8), 3.0)), "a map from before the recovery still holds"
    store = Store.open(store_path)
    check_records(store, 3)
    assert torch.equal(store["new-0"].hidden_states, make_rows(2))
    assert list(store.verify()) == []
    # Rows 0..5 in shards of 5: the second shard is cut to one row, the third is gone, and so is the lock.
    files = sorted(path.name for path in (store_path / "shards").iterdir())
    assert files == ["0001-00000.safetensors", "0001-00001.safetensors", "0003-00000.safetensors"]
    assert load_file(store_path / "shards" / files[1])["hidden_states"].shape == (1, 3, 8)
    summary = summarize(store)
    assert (summary.logs, summary.logs_open, summary.logs_unclean, summary.rows_dropped) == (3, 0, 1, 9)
    caplog.clear()
    StoreWriter.open(store_path, meta).close()
    assert caplog.text == "", "said once"


def test_writer_killed_before_its_first_record(store_path, meta, caplog) -> None:
    writer = start(store_path, "dead", 0, "stay")
    assert writer.stdout is not None and writer.stdout.readline() == "ready\n"
    writer.kill()
    writer.wait()
    writer.stdout.close()
    StoreWriter.open(store_path, meta).close()
    assert "9 of its 9 rows are in no record" in caplog.text
    assert list((store_path / "shards").iterdir()) == []
    assert len(Store.open(store_path)) == 0


def test_log_without_its_lock_is_left_alone_and_said(store_path, meta, make_rows, make_record, caplog) -> None:
    writer = StoreWriter.open(store_path, meta, rows_per_shard=4)
    writer.append(make_rows(2))
    writer.commit([make_record("a", range(2))])
    lock = store_path / "shards" / "0001.lock"
    content = lock.read_bytes()
    lock.unlink()
    StoreWriter.open(store_path, meta).close()
    assert "log 1 of" in caplog.text and "left alone" in caplog.text
    assert load_file(store_path / "shards" / "0001-00000.safetensors")["hidden_states"].shape == (4, 3, 8)
    lock.write_bytes(content)
    writer.close()


def test_damaged_log_is_not_recovered_silently(store_path, meta) -> None:
    writer = start(store_path, "dead", 3, "stay")
    assert writer.stdout is not None and writer.stdout.readline() == "ready\n"
    writer.kill()
    writer.wait()
    writer.stdout.close()
    (store_path / "shards" / "0001-00001.safetensors").write_bytes(b"\x10" + bytes(23))
    with pytest.raises(StoreError, match=r"0001-00001.safetensors is cut short: its records need 120 bytes"):
        StoreWriter.open(store_path, meta)


def test_locks_of_writers_that_died_before_or_after_their_log_are_removed(store_path, meta) -> None:
    StoreWriter.open(store_path, meta).close()
    for log in (1, 7):
        (store_path / "shards" / f"{log:04d}.lock").touch()
    with StoreWriter.open(store_path, meta):
        assert [path.name for path in (store_path / "shards").iterdir()] == ["0002.lock"]


def test_threads_share_a_writer(store_path, meta, make_record) -> None:
    def write(name: int) -> None:
        for _ in range(20):
            first = writer.append(torch.full((2, 3, 8), float(name + 1)))
            writer.commit([make_record(f"thread-{name}", range(first, first + 2))])

    with StoreWriter.open(store_path, meta, rows_per_shard=7) as writer:
        threads = [threading.Thread(target=write, args=(name,)) for name in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    store = Store.open(store_path)
    assert len(store) == 60
    check_records(store, 60)
