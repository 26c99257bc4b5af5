"""What ends an engine's process is written down; a shutdown is not a failure."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.patches.conftest import Apply
from vllm_overlay import failures
from vllm_overlay.patches.note_failures_of_engines import PATCH
from vllm_overlay.shared_folder import FOLDER_VARIABLE


@pytest.fixture
def engine(apply: Apply, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """An engine of vLLM's whose loop does what `engine.work` does."""
    from vllm.v1.engine.core import EngineCoreProc

    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    monkeypatch.setattr(failures, "_RANKS", [0])
    apply(PATCH)

    class Engine(EngineCoreProc):  # type: ignore[misc]
        def __init__(self) -> None:
            self.work: Any = None
            # Asked for in 0.32.0.
            self.enable_fault_tolerance = False

        def _process_input_queue(self) -> None:
            self.work()

        def _handle_shutdown(self) -> bool:
            return True

    return Engine()


def fail() -> None:
    raise ValueError("boom-17")


def stop() -> None:
    raise SystemExit


def test_the_exception_is_noted_and_goes_on(engine: Any) -> None:
    engine.work = fail
    with pytest.raises(ValueError, match="boom-17"):
        engine.run_busy_loop()
    (failure,) = failures.read_failures({os.getpid()})
    assert (failure.type, failure.message, failure.rank, failure.process) == ("ValueError", "boom-17", 0, "engine")
    assert failure.file == __file__


def test_an_end_that_was_asked_for_is_none(engine: Any) -> None:
    engine.work = stop
    with pytest.raises(SystemExit):
        engine.run_busy_loop()
    assert failures.read_failures({os.getpid()}) == []


def test_an_engine_that_does_not_start(engine: Any) -> None:
    from vllm.v1.engine.core import EngineCoreProc

    with pytest.raises(TypeError, match="missing"):
        EngineCoreProc()
    (failure,) = failures.read_failures({os.getpid()})
    assert failure.type == "TypeError"
