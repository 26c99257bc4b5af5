"""What keeps a worker's process from starting is written down with its rank."""

from __future__ import annotations

import inspect
import os
from pathlib import Path
from typing import Any

import pytest

from tests.patches.conftest import Apply
from vllm_overlay import failures
from vllm_overlay.patches.note_failures_of_starting_workers import PATCH
from vllm_overlay.shared_folder import FOLDER_VARIABLE


def test_the_exception_is_noted_and_goes_on(apply: Apply, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.executor import multiproc_executor

    def fail(*args: object, **kwargs: object) -> None:
        raise ValueError("boom-17")

    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    monkeypatch.setattr(multiproc_executor, "WorkerWrapperBase", fail)
    apply(PATCH)
    facts: dict[str, Any] = dict.fromkeys(list(inspect.signature(multiproc_executor.WorkerProc).parameters), None)
    with pytest.raises(ValueError, match="boom-17"):
        multiproc_executor.WorkerProc(**facts | {"rank": 1})
    (failure,) = failures.read_failures({os.getpid()})
    assert (failure.type, failure.message, failure.rank, failure.process) == ("ValueError", "boom-17", 1, "worker")
