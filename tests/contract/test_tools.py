"""The scripts of tools/ that make environments and folders: what they refuse, and what they keep."""

from __future__ import annotations

import importlib
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

from tests.contract.conftest import REPOSITORY


@pytest.fixture
def environments(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(REPOSITORY / "tools")
    return importlib.import_module("environments")


@pytest.fixture
def demo(environments: ModuleType) -> ModuleType:
    return importlib.import_module("demo")


def write_wheel(folder: Path, requirement: str) -> Path:
    wheel = folder / f"{len(list(folder.iterdir()))}.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("x-1.dist-info/METADATA", f"Name: x\nVersion: 1\nRequires-Dist: {requirement}\n\ntext\n")
    return wheel


def test_an_environment_is_another_one_when_a_requirement_changes(environments: ModuleType, tmp_path: Path) -> None:
    release = environments.RELEASES["0.16.0"]
    interpreter = environments.Interpreter("python3", (3, 12))
    wheels = [write_wheel(tmp_path, requirement) for requirement in ("numpy>=1", "numpy>=1", "numpy>=2")]
    first, same, other = (environments.environment_name(release, interpreter, wheel) for wheel in wheels)
    assert first == same != other
    assert first.startswith("0.16.0-py3.12-")


def test_the_python_that_runs_the_tools_is_taken_if_it_fits(environments: ModuleType) -> None:
    found = environments.find_interpreter(environments.RELEASES["0.16.0"])
    assert found == environments.Interpreter(sys.executable, sys.version_info[:2])


def test_without_a_python_that_fits_one_line_says_which_does(
    environments: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    shim = tmp_path / "python3.12"  # as a version manager leaves one for a Python that is not installed
    shim.write_text("#!/bin/sh\nexit 127\n", encoding="utf-8")
    shim.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(shim))
    with pytest.raises(environments.NoInterpreter, match=r"^vLLM 0\.32\.0 needs Python 3\.11 to 3\.13, and none"):
        environments.find_interpreter(environments.RELEASES["0.32.0"])


def test_the_demonstration_leaves_somebody_elses_folder_alone(demo: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("x", encoding="utf-8")
    for resume in (False, True):
        with pytest.raises(demo.DemoFailed, match="is not empty and no demonstration wrote it"):
            demo.open_output(tmp_path, resume=resume)
    assert [entry.name for entry in tmp_path.iterdir()] == ["thesis.txt"]


def test_the_demonstration_starts_anew_unless_it_is_told_to_resume(demo: ModuleType, tmp_path: Path) -> None:
    folder = tmp_path / "output"
    demo.open_output(folder, resume=False).note("prompts", 1.5)
    assert demo.open_output(folder, resume=True).seconds == {"prompts": 1.5}
    assert demo.open_output(folder, resume=False).seconds == {}


def test_prompts_are_taken_from_all_over_the_file(demo: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "all").write_text("\n".join(map(str, range(10))) + "\n", encoding="utf-8")
    demo.take_evenly(tmp_path / "all", tmp_path / "some", 4)
    assert (tmp_path / "some").read_text(encoding="utf-8").split() == ["0", "2", "5", "7"]
