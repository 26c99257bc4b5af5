"""Whoever starts engines shares a folder with them, and knows them by their processes."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.patches.conftest import Apply
from vllm_overlay import failures
from vllm_overlay.patches.share_failures_with_engines import PATCH, build
from vllm_overlay.shared_folder import FOLDER_VARIABLE


def test_the_folder_is_there_before_the_engines_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, "")
    monkeypatch.delenv(FOLDER_VARIABLE)
    seen: list[tuple[str | None, Any]] = []

    class Manager:
        @build
        def __init__(self, count: int) -> None:
            seen.append((os.environ.get(FOLDER_VARIABLE), count))
            self.processes = [SimpleNamespace(pid=11), SimpleNamespace(pid=12)]

    manager = Manager(count=2)
    ((folder, count),) = seen
    assert folder is not None
    assert Path(folder).is_dir()
    assert count == 2
    assert failures._ENGINES[manager] == (11, 12)


def test_it_fits(apply: Apply) -> None:
    assert len(apply(PATCH).replacements) == 1
