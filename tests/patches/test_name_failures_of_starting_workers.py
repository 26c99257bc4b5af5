"""The executor's error holds what its own workers wrote."""

from __future__ import annotations

from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.patches.conftest import Apply
from vllm_overlay import failures
from vllm_overlay.patches.name_failures_of_starting_workers import PATCH
from vllm_overlay.shared_folder import FOLDER_VARIABLE


def make_handles(*process_ids: int) -> list[Any]:
    """Of workers that closed their pipes."""
    handles = []
    for rank, process_id in enumerate(process_ids):
        reader, writer = Pipe(duplex=False)
        writer.close()
        handles.append(SimpleNamespace(proc=SimpleNamespace(pid=process_id), rank=rank, ready_pipe=reader))
    return handles


def note(process_id: int, rank: int, message: str) -> None:
    facts = {"process_id": process_id, "engine_id": 1, "rank": rank, "message": message, "time_ns": process_id}
    place = {"file": "worker.py", "line": 17, "function": "load_model", "code": "raise", "traceback": "Traceback ..."}
    failures.note(failures.Failure(type="ValueError", process="worker", **facts, **place))  # type: ignore[arg-type]


def test_the_error_names_the_first_failure(apply: Apply, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.executor.multiproc_executor import WorkerProc

    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    apply(PATCH)
    for process_id, rank, message in ((22, 1, "boom-17"), (23, 0, "after it"), (21, 0, "another executor's")):
        note(process_id, rank, message)
    with pytest.raises(Exception, match=r"^WorkerProc initialization failed .*") as caught:
        WorkerProc.wait_for_ready(make_handles(23, 22))
    _, first, _, then = str(caught.value).split("\n")
    expected = '(rank 1, worker process 22, file "worker.py", line 17, in load_model: raise)'
    assert first == f"vllm-overlay: what failed first: ValueError: boom-17 {expected}"
    assert then.startswith("then: ValueError: after it (rank 0")


def test_workers_that_wrote_nothing(apply: Apply, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.executor.multiproc_executor import WorkerProc

    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    apply(PATCH)
    with pytest.raises(Exception, match=r"^WorkerProc initialization failed [^\n]*$"):
        WorkerProc.wait_for_ready(make_handles(23))
