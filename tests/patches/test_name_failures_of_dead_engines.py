"""`EngineDeadError` is vLLM's own, with what ended the engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.patches.conftest import Apply
from vllm_overlay import failures
from vllm_overlay.patches.name_failures_of_dead_engines import PATCH
from vllm_overlay.shared_folder import FOLDER_VARIABLE


class Engines:
    """Stands for vLLM's manager of engine processes."""


def test_its_text_names_what_ended_the_engine(apply: Apply, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.engine.exceptions import EngineDeadError

    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    stock = str(EngineDeadError())
    apply(PATCH)
    assert str(EngineDeadError()) == stock
    failure = failures.describe(ValueError("boom-17"), "engine", 0)
    failures.note(failure)
    manager = Engines()
    failures.note_engines(manager, [failure.process_id])
    error = EngineDeadError("more", suppress_context=True)
    assert error.args == (f"{stock}\nvllm-overlay: what failed first: {failure.text}", "more")
    assert error.__suppress_context__
    assert type(error) is EngineDeadError
