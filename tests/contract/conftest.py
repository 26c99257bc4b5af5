"""A copy of the working tree, and what is built and installed from it, once for all contract tests."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import pytest
from environments import copy_sources

REPOSITORY = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class ScratchEnvironment:
    """A virtual environment with pip, and what activation needs: wrapt and packaging. No torch, no vLLM."""

    folder: Path
    uv: str

    @property
    def python(self) -> str:
        return str(self.folder / "bin" / "python")

    @property
    def site_packages(self) -> Path:
        return next(self.folder.glob("lib/python*/site-packages"))

    def list_installed(self) -> set[str]:
        """The names at the top of site-packages."""
        return {entry.name for entry in self.site_packages.iterdir()}

    def install(self, *words: str) -> None:
        run(self.uv, "pip", "install", "--quiet", "--python", self.python, *words)


def run(*command: str, cwd: Path | None = None, env: dict[str, str] | None = None) -> str:
    """The command's output. A failure fails the test with all that it printed."""
    done = subprocess.run(
        command, cwd=cwd, env=env, text=True, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}"
    return done.stdout


@pytest.fixture(scope="session")
def uv() -> str:
    found = shutil.which("uv", path=sysconfig.get_path("scripts")) or shutil.which("uv")
    assert found, "uv is not installed: pip install 'vllm-overlay[dev]'"
    return found


@pytest.fixture(scope="session")
def source_tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a build needs of the working tree, where a build may leave its folders."""
    tree = tmp_path_factory.mktemp("source")
    copy_sources(tree)
    return tree


@pytest.fixture(scope="session")
def wheel(source_tree: Path, uv: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel that is built from the sdist, as an index would have them."""
    output = tmp_path_factory.mktemp("dist")
    run(uv, "build", "--quiet", "--python", sys.executable, "--out-dir", str(output), str(source_tree))
    return next(output.glob("*.whl"))


@pytest.fixture
def scratch(tmp_path: Path, uv: str) -> ScratchEnvironment:
    folder = tmp_path / "environment"
    run(uv, "venv", "--quiet", "--seed", "--python", sys.executable, str(folder))
    environment = ScratchEnvironment(folder, uv)
    environment.install("wrapt", "packaging")
    return environment
