"""Activation in fresh interpreters, with stand-ins for vLLM where the release matters."""

from __future__ import annotations

import ast
import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ON = {"VLLM_OVERLAY": "1"}


def run_python(code: str, extra: dict[str, str], path: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("VLLM_")} | extra
    if path is not None:
        environment["PYTHONPATH"] = str(path)
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)


@pytest.fixture
def stub(tmp_path: Path) -> Path:
    """A package called vllm that says it is release 9.9.9."""
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text("__version__ = '9.9.9'\n")
    return tmp_path


def test_an_unknown_release_is_refused_at_import(stub: Path) -> None:
    """CASES 38: refused with the supported releases and the override's name; nothing half-patched."""
    done = run_python("import vllm", ON, stub)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert "vLLM 9.9.9 is not a supported release; nothing was patched. Supported: 0.11.0, 0.11.1, 0.12.0" in last
    assert "0.31.0, 0.32.0" in last
    assert "VLLM_OVERLAY_RELEASE" in last
    assert "VLLM_OVERLAY_POLICY=warn" in last
    left = run_python("try:\n import vllm\nexcept ImportError:\n import sys; print('vllm' in sys.modules)", ON, stub)
    assert left.stdout.strip() == "False"


def test_a_refusal_holds_at_the_second_import_too(stub: Path) -> None:
    """wrapt runs a module's hooks once: a program that catches the first refusal must not get a stock vLLM."""
    code = "try:\n import vllm\nexcept ImportError:\n pass\nimport vllm"
    done = run_python(code, ON, stub)
    assert done.returncode == 1
    assert "vLLM 9.9.9 is not a supported release" in done.stderr.strip().splitlines()[-1]


def test_under_warn_a_newer_release_is_tried_loudly(stub: Path) -> None:
    done = run_python("import vllm; print(vllm.__version__)", ON | {"VLLM_OVERLAY_POLICY": "warn"}, stub)
    assert done.stdout.strip() == "9.9.9"
    assert "WARNING: vLLM 9.9.9 is newer than the newest supported release and is treated as 0.33.0" in done.stderr


def test_a_point_release_is_served_as_its_line_and_the_ledger_says_so(tmp_path: Path) -> None:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text("__version__ = '0.16.1'\n")
    code = "import vllm; from vllm_overlay.activation import current_ledger; print(current_ledger().notices)"
    done = run_python(code, ON, tmp_path)
    assert done.stdout.strip() == "['vLLM 0.16.1 is treated as 0.16.0']"
    assert "WARNING" not in done.stderr


@pytest.mark.parametrize("version", ["0.1.dev1+gabc", "0.16.0rc1", "0.10.2"])
def test_development_builds_and_old_releases_are_refused(tmp_path: Path, version: str) -> None:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text(f"__version__ = {version!r}\n")
    done = run_python("import vllm", ON, tmp_path)
    assert done.returncode == 1
    assert "set VLLM_OVERLAY_RELEASE to the release it stands for" in done.stderr


def test_a_wrong_setting_is_refused_at_import_and_not_before(stub: Path) -> None:
    assert run_python("print('fine')", ON | {"VLLM_OVERLAY_LAYRES": "1"}).stdout.strip() == "fine"
    done = run_python("import vllm", ON | {"VLLM_OVERLAY_LAYRES": "1"}, stub)
    assert done.returncode == 1
    assert "unknown variable VLLM_OVERLAY_LAYRES: did you mean VLLM_OVERLAY_LAYERS" in done.stderr


def test_a_plugin_filter_that_leaves_us_out_is_said(stub: Path) -> None:
    """CASES 39."""
    extra = ON | {"VLLM_OVERLAY_POLICY": "warn", "VLLM_PLUGINS": "other"}
    assert "VLLM_PLUGINS='other' leaves out 'vllm_overlay'" in run_python("import vllm", extra, stub).stderr


def test_unset_means_that_nothing_of_ours_is_imported(stub: Path) -> None:
    code = "import sys, vllm; print([m for m in sys.modules if m.startswith(('vllm_overlay', 'wrapt'))])"
    assert run_python(code, {}, stub).stdout.strip() == "[]"


def list_required(requirements: Iterable[str]) -> set[str]:
    """The distributions that these requirements bring, by their normal names; only what is installed here."""
    required: set[str] = set()
    waiting = [Requirement(text) for text in requirements]
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        if name in required or not (requirement.marker is None or requirement.marker.evaluate({"extra": ""})):
            continue
        required.add(name)
        with contextlib.suppress(metadata.PackageNotFoundError):
            waiting += map(Requirement, metadata.requires(name) or ())
    return required


def test_the_training_side_imports_without_vllm() -> None:
    """CASES 40: every module of it, where nothing can be imported but what the extra `train` requires."""
    project = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    lists = re.findall(r"^(?:dependencies|train) = (\[.*?\])$", project, re.MULTILINE | re.DOTALL)
    required = list_required([text for found in lists for text in ast.literal_eval(found)])
    installed = metadata.packages_distributions()
    absent = {module for module, names in installed.items() if not required & set(map(canonicalize_name, names))}
    assert {"vllm", "torch", "matplotlib", "safetensors"} & absent == {"vllm"}
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({sorted(absent - {'vllm_overlay'})}))\n"
        "import importlib, pkgutil, vllm_overlay\n"
        "for side in ('store', 'dataset', 'eagle3', 'cli'):\n"
        "    package = importlib.import_module(f'vllm_overlay.{side}')\n"
        "    for module in pkgutil.iter_modules(package.__path__, f'{package.__name__}.'):\n"
        "        if not module.name.endswith('__main__'):\n"
        "            print(importlib.import_module(module.name).__name__)\n"
    )
    done = run_python(code, {})
    assert done.returncode == 0, done.stderr
    assert {"vllm_overlay.store.reader", "vllm_overlay.eagle3.training"} <= set(done.stdout.split())


def test_folders_refuse_to_be_imported_under_their_own_names(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    for name in ("overlay", "patches", "compat"):
        done = run_python(f"import {name}", {}, root)
        assert done.returncode == 1
        assert "this folder is the package vllm_overlay" in done.stderr


def write_old_consumer(folder: Path, version: str) -> None:
    """A speculators that uses its schemas while it is imported, before it imports vLLM; and a vLLM 0.16.0."""
    (folder / "vllm").mkdir()
    (folder / "vllm" / "__init__.py").write_text("__version__ = '0.16.0'\n")
    (folder / "speculators" / "utils").mkdir(parents=True)
    (folder / "speculators" / "__init__.py").write_text("import speculators.utils.pydantic_utils\n")
    (folder / "speculators" / "utils" / "__init__.py").touch()
    (folder / "speculators" / "utils" / "pydantic_utils.py").write_text(
        "import pydantic\n"
        "class ReloadableBaseModel(pydantic.BaseModel):\n"
        "    @classmethod\n"
        "    def reload_schema(cls): ...\n"
    )
    (folder / f"speculators-{version}.dist-info").mkdir()
    (folder / f"speculators-{version}.dist-info" / "METADATA").write_text(f"Name: speculators\nVersion: {version}\n")


@pytest.mark.parametrize(
    ("version", "state"), [("0.3.0", "applied"), ("0.4.0", "not needed here")], ids=["ours", "a later one"]
)
def test_a_package_that_starts_before_vllm_is_patched_in_the_versions_we_know(
    tmp_path: Path, version: str, state: str
) -> None:
    pytest.importorskip("pydantic")
    write_old_consumer(tmp_path, version)
    code = (
        "import sys, speculators; print('vllm' in sys.modules); import vllm\n"
        "from vllm_overlay.activation import current_ledger\n"
        "print(current_ledger().entries['name_torch_for_speculators'].state)"
    )
    done = run_python(code, ON, tmp_path)
    assert done.stdout.split("\n")[:2] == [str(version == "0.3.0"), state], done.stderr
