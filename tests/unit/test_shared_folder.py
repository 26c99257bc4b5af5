"""The folder that the processes of a run share."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_overlay.shared_folder import FOLDER_VARIABLE, find_folder, share_folder


def test_the_folder_is_shared_once_and_goes_with_its_owner() -> None:
    code = (
        "import os; from vllm_overlay.shared_folder import FOLDER_VARIABLE, share_folder; share_folder();"
        "first = os.environ[FOLDER_VARIABLE]; share_folder(); assert os.environ[FOLDER_VARIABLE] == first;"
        "assert os.path.isdir(first); print(first)"
    )
    environment = {key: value for key, value in os.environ.items() if key != FOLDER_VARIABLE}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip()
    assert not Path(done.stdout.strip()).exists()


def test_a_folder_of_the_parents_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    share_folder()
    assert os.environ[FOLDER_VARIABLE] == str(tmp_path)
    assert find_folder() == tmp_path


def test_a_folder_whose_owner_is_gone_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "gone"))
    assert find_folder() is None
