"""An executor shares a folder with its workers before it starts them, its starter's if there is one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.patches.conftest import Apply
from vllm_overlay.patches.share_failures_with_workers import PATCH
from vllm_overlay.shared_folder import FOLDER_VARIABLE


@pytest.fixture
def seen(apply: Apply, monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    """The folder as it was when workers were about to be started; the real method goes on to fail there."""
    from vllm.v1.executor import multiproc_executor

    folders: list[str | None] = []

    def stop(*args: object, **kwargs: object) -> None:
        folders.append(os.environ.get(FOLDER_VARIABLE))
        raise InterruptedError

    executor = multiproc_executor.MultiprocExecutor.__new__(multiproc_executor.MultiprocExecutor)
    monkeypatch.setattr(multiproc_executor.weakref, "finalize", stop)
    apply(PATCH)
    with pytest.raises(InterruptedError):
        executor._init_executor()
    return folders


@pytest.fixture
def no_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, "")
    monkeypatch.delenv(FOLDER_VARIABLE)


def test_a_new_folder(no_folder: None, seen: list[str | None]) -> None:
    (folder,) = seen
    assert folder is not None
    assert Path(folder).is_dir()


@pytest.fixture
def inherited(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    return str(tmp_path)


def test_the_starters_folder(inherited: str, seen: list[str | None]) -> None:
    assert seen == [inherited]
