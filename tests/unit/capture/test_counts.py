"""A worker's counts, on their way to whoever answers a scrape."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from vllm_overlay.capture.counts import COUNTERS, COUNTS, CountsCollector, CountsFile, read_counts
from vllm_overlay.capture.recorder import Recorder, RequestFacts, Statistics
from vllm_overlay.capture.rows import Plan
from vllm_overlay.capture.session import Bystander, CaptureSession
from vllm_overlay.capture.transfer import open_transfer
from vllm_overlay.shared_folder import FOLDER_VARIABLE
from vllm_overlay.store import Store, StoreMeta, StoreWriter

ONE = {name: number for number, name in enumerate(COUNTS, 1)}
TEN = {name: 10 * number for name, number in ONE.items()}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    return tmp_path


def collect() -> dict[tuple[str, str], float]:
    return {
        (sample.name, sample.labels["log"]): sample.value
        for family in CountsCollector().collect()
        for sample in family.samples
    }


def test_every_worker_has_every_count() -> None:
    session: Any = CaptureSession.__new__(CaptureSession)
    session._book = session._transfer = None
    session._recorder = SimpleNamespace(statistics=Statistics(num_rows=7, num_incomplete=2), backlog=3)
    assert session.statistics() == dict.fromkeys(COUNTS, 0) | {"rows": 7, "incomplete_records": 2, "backlog": 3}
    assert Bystander().statistics() == dict.fromkeys(COUNTS, 0)


def test_two_workers_are_told_apart_by_their_logs(folder: Path) -> None:
    CountsFile(1).write(ONE)
    CountsFile(12).write(TEN)
    assert read_counts() == {"1": ONE, "12": TEN}
    found = collect()
    assert len(found) == 2 * len(COUNTS)
    for name in COUNTS:
        shown = f"vllm_overlay_capture_{name}" + ("_total" if name in COUNTERS else "")
        assert found[shown, "1"] == ONE[name]
        assert found[shown, "12"] == TEN[name]


def test_the_file_holds_what_was_written_last_and_is_left_alone_while_nothing_changes(folder: Path) -> None:
    file = CountsFile(3)
    file.write(ONE)
    file.write(TEN)
    assert read_counts() == {"3": TEN}
    (path,) = (folder / "counts").glob("*.json")
    path.unlink()
    file.write(dict(TEN))
    assert read_counts() == {}


def test_a_scrape_sees_no_file_that_is_being_written(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "rename", lambda draft, target: draft)
    CountsFile(1).write(ONE)
    assert [file.name for file in (folder / "counts").iterdir()] == ["1.new"]
    assert read_counts() == {}


def test_a_file_that_goes_during_a_scrape_takes_no_other_along(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    CountsFile(1).write(ONE)
    CountsFile(12).write(TEN)
    read_text = Path.read_text

    def read_or_miss(file: Path, **options: Any) -> str:
        if file.name == "1.json":
            file.unlink()
        return read_text(file, **options)

    monkeypatch.setattr(Path, "read_text", read_or_miss)
    assert read_counts() == {"12": TEN}


def test_every_metric_says_what_it_counts_while_no_worker_has_captured(folder: Path) -> None:
    families = list(CountsCollector().collect())
    assert [family.samples for family in families] == [[]] * len(COUNTS)
    assert all(family.documentation.endswith(".") for family in families)
    assert [family.type for family in families] == ["counter"] * 5 + ["gauge"] * 2


def test_a_scrape_after_the_run_has_ended_shows_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    CountsFile(1).write(ONE)

    def find_gone(*args: object, **kwargs: object) -> str:
        raise FileNotFoundError

    monkeypatch.setattr(Path, "read_text", find_gone)
    assert read_counts() == {}
    monkeypatch.setenv(FOLDER_VARIABLE, str(folder / "gone"))
    assert collect() == {}


def test_a_worker_without_a_shared_folder_captures_without_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FOLDER_VARIABLE, raising=False)
    CountsFile(1).write(ONE)
    assert read_counts() == {}


def test_a_folder_that_cannot_be_written_to_is_logged_once(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    (folder / "counts").write_text("a file in the way")
    file = CountsFile(1)
    with caplog.at_level(logging.ERROR):
        file.write(ONE)
        file.write(TEN)
    assert len(caplog.records) == 1
    assert "/metrics will not show" in caplog.text


def test_the_counts_after_a_commit_are_those_of_the_store(folder: Path, tmp_path: Path) -> None:
    meta = StoreMeta((1, 2), 4, "float32", 2, "toy", "f" * 64, "0.16.0", "V1")
    recorder = Recorder(StoreWriter.open(tmp_path / "store", meta), meta.layer_ids)
    file = CountsFile(recorder.log)

    def write_counts() -> None:
        counts = recorder.statistics
        file.write(dict.fromkeys(COUNTS, 0) | {"rows": counts.num_rows, "records": counts.num_records})

    recorder.call_after_commits(write_counts)
    recorder.begin("key", RequestFacts("r", np.array([7, 8, 9]), None, None))
    plan = Plan(None, 3, 0, ("key",), np.array([0]), np.array([3]))
    transfer = open_transfer(torch.randn(3, 2, 4), "auto")
    recorder.write(plan, transfer.send(3, None, torch.tensor([7, 8, 9], dtype=torch.int32)))
    recorder.finish("key", np.arange(3), "stop")
    recorder.flush()
    with Store.open(tmp_path / "store") as store:
        assert read_counts() == {"1": dict.fromkeys(COUNTS, 0) | {"rows": 3, "records": len(store)}}
    recorder.close()


def test_counts_are_written_while_nothing_is_committed(folder: Path, tmp_path: Path) -> None:
    meta = StoreMeta((1, 2), 4, "float32", 2, "toy", "f" * 64, "0.16.0", "V1")
    recorder = Recorder(StoreWriter.open(tmp_path / "store", meta), meta.layer_ids)
    file = CountsFile(recorder.log)
    recorder.call_after_commits(lambda: file.write(ONE))
    deadline = time.monotonic() + 20
    while read_counts() != {"1": ONE}:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    recorder.close()
