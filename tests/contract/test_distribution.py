"""What the wheel, the sdist and editable installs put into site-packages, and that nothing of it stays behind."""

from __future__ import annotations

import importlib.metadata
import os
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.contract.conftest import REPOSITORY, ScratchEnvironment, run

STARTUP_FILE = "vllm_overlay.pth"
FOLDERS = {"overlay": "vllm_overlay", "patches": "vllm_overlay/patches", "compat": "vllm_overlay/compat"}
LOADED = (
    "import sys; print(sorted({name.split('.')[0] for name in sys.modules} & {'vllm_overlay', 'wrapt', 'packaging'}))"
)


def modules_in_tree() -> set[str]:
    return {
        f"{imported_as}/{file.relative_to(REPOSITORY / folder).as_posix()}"
        for folder, imported_as in FOLDERS.items()
        for file in (REPOSITORY / folder).rglob("*.py")
    }


def test_every_module_of_the_tree_is_in_the_wheel_and_nothing_else(wheel: Path) -> None:
    expected = modules_in_tree() | {"vllm_overlay/py.typed", STARTUP_FILE}
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert packed == expected


def test_the_record_lists_the_startup_file_once(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        record = next(name for name in archive.namelist() if name.endswith(".dist-info/RECORD"))
        lines = archive.read(record).decode().splitlines()
    assert [line.split(",")[0] for line in lines].count(STARTUP_FILE) == 1


def test_the_sdist_can_build_itself(wheel: Path) -> None:
    """The wheel fixture was built from it; this names the one file that setuptools would not have put in."""
    with tarfile.open(next(wheel.parent.glob("*.tar.gz"))) as archive:
        assert any(name.endswith("/tools/build_hooks.py") for name in archive.getnames())


def from_wheel(scratch: ScratchEnvironment, wheel: Path, tree: Path) -> None:
    scratch.install("--no-deps", str(wheel))


def editable_by_uv(scratch: ScratchEnvironment, wheel: Path, tree: Path) -> None:
    scratch.install("--no-deps", "--editable", str(tree))


def editable_by_pip(scratch: ScratchEnvironment, wheel: Path, tree: Path) -> None:
    run(scratch.python, "-m", "pip", "install", "--no-deps", "--editable", str(tree))


Install = Callable[[ScratchEnvironment, Path, Path], None]


@pytest.mark.parametrize("install", [from_wheel, editable_by_uv, editable_by_pip])
def test_install_activate_and_uninstall(
    install: Install, scratch: ScratchEnvironment, wheel: Path, source_tree: Path
) -> None:
    before = scratch.list_installed()
    install(scratch, wheel, source_tree)
    added = scratch.list_installed() - before
    version = importlib.metadata.version("vllm-overlay")
    assert {name for name in added if not name.startswith("__editable__")} - {"vllm_overlay"} == {
        STARTUP_FILE,
        f"vllm_overlay-{version}.dist-info",
    }

    clean = {key: value for key, value in os.environ.items() if not key.startswith(("VLLM_", "PYTHON"))}
    for off in ({}, {"VLLM_OVERLAY": ""}, {"VLLM_OVERLAY": "0"}):
        assert run(scratch.python, "-c", LOADED, env=clean | off).strip() == "[]"
    on = run(scratch.python, "-c", LOADED, env=clean | {"VLLM_OVERLAY": "1"})
    assert on.strip() == "['packaging', 'vllm_overlay', 'wrapt']"
    own = "import vllm_overlay.settings, vllm_overlay.compat.releases"
    run(scratch.python, "-c", own, env=clean, cwd=scratch.folder)
    for leak in ("overlay", "patches", "compat", "tests", "tools", "build_hooks"):
        code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({leak!r}) is not None)"
        run(scratch.python, "-I", "-c", code, env=clean)

    run(scratch.uv, "pip", "uninstall", "--quiet", "--python", scratch.python, "vllm-overlay")
    assert scratch.list_installed() == before


def test_a_folder_is_not_importable_under_its_own_name(source_tree: Path, scratch: ScratchEnvironment) -> None:
    for folder in FOLDERS:
        code = f"try:\n import {folder}\nexcept ImportError as error:\n print(error)"
        assert "this folder is the package vllm_overlay" in run(scratch.python, "-c", code, cwd=source_tree)
