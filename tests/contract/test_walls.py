"""Who may import what, set attributes on vLLM, and compare its versions; each rule is also seen to fail."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

import vllm_overlay
from tests.contract.conftest import REPOSITORY

OVERLAY, PATCHES, COMPAT = (sorted((REPOSITORY / folder).rglob("*.py")) for folder in ("overlay", "patches", "compat"))


def lint_imports(package: Path, scratch: Path) -> subprocess.CompletedProcess[str]:
    """import-linter's verdict on the package, with the contracts of pyproject.toml."""
    command = shutil.which("lint-imports", path=sysconfig.get_path("scripts"))
    assert command, "import-linter is not installed: pip install 'vllm-overlay[dev]'"
    words = [command, "--no-cache", "--config", str(REPOSITORY / "pyproject.toml")]
    environment = os.environ | {"PYTHONPATH": str(package.parent)}
    return subprocess.run(words, cwd=scratch, env=environment, text=True, capture_output=True, check=False)


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A copy of the package as it is installed here."""
    installed = Path(vllm_overlay.__path__[0])
    return shutil.copytree(installed, tmp_path / "vllm_overlay", ignore=shutil.ignore_patterns("__pycache__"))


def test_the_import_contracts_hold(package: Path) -> None:
    done = lint_imports(package, package.parent)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("module", "statement", "contract"),
    [
        ("store/meta.py", "import vllm", "training side"),
        ("eagle3/loss.py", "def late():\n    import vllm.v1.outputs", "training side"),
        ("dataset/mask.py", "from vllm_overlay import patches", "training side"),
        ("eagle3/data.py", "from vllm_overlay.capture.taps import TAP_FORMAT", "training side"),
        ("errors.py", "from vllm_overlay.capture import rows", "training side"),
        ("source/registry.py", "def late():\n    import vllm.envs", "reads vLLM as text"),
        ("check/space.py", "import torch", "reads vLLM as text"),
        ("compat/releases.py", "from vllm_overlay.errors import OverlayError", "compat imports nothing"),
    ],
)
def test_a_planted_import_breaks_its_contract(package: Path, module: str, statement: str, contract: str) -> None:
    with (package / module).open("a", encoding="utf-8") as file:
        file.write(f"\n{statement}\n")
    done = lint_imports(package, package.parent)
    verdicts = " ".join(done.stdout.split())
    assert done.returncode == 1
    assert re.search(rf"{contract}[^.]*? BROKEN", verdicts), done.stdout


def test_the_contract_of_compat_names_everything_else_of_ours() -> None:
    text = (REPOSITORY / "pyproject.toml").read_text(encoding="utf-8")
    forbidden = set(re.findall(r'"(vllm_overlay\.\w+)"', text[text.index('"compat imports nothing of ours"') :]))
    tree = {f"vllm_overlay.{file.relative_to(REPOSITORY / 'overlay').parts[0].removesuffix('.py')}" for file in OVERLAY}
    assert forbidden == (tree | {"vllm_overlay.patches", "vllm_overlay.compat"}) - {"vllm_overlay.__init__"}


def find_attribute_setters(source: str) -> Iterator[str]:
    """Calls that set or delete an attribute by name, and assignments to attributes of anything imported from vLLM."""
    tree = ast.parse(source)
    imported = {name for node in ast.walk(tree) for name in names_from_vllm(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("setattr", "delattr"):
            yield f"line {node.lineno}: {node.func.id}"
        if isinstance(node, ast.ImportFrom) and node.module == "wrapt":
            yield from (f"line {node.lineno}: wrapt.{alias.name}" for alias in node.names if "wrapper" in alias.name)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del) and root(node) in imported:
            yield f"line {node.lineno}: assignment to {ast.unparse(node)}"


def names_from_vllm(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [(a.asname or a.name).split(".")[0] for a in node.names if a.name.split(".")[0] == "vllm"]
    if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
        return [alias.asname or alias.name for alias in node.names]
    return []


def root(node: ast.expr) -> str | None:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


@pytest.mark.parametrize("file", OVERLAY + PATCHES, ids=lambda file: file.relative_to(REPOSITORY).as_posix())
def test_only_the_patch_record_sets_attributes(file: Path) -> None:
    if file != REPOSITORY / "overlay" / "patch.py":
        assert list(find_attribute_setters(file.read_text(encoding="utf-8"))) == []


@pytest.mark.parametrize(
    "source",
    [
        "setattr(x, 'y', 1)",
        "import vllm.envs\nvllm.envs.VLLM_PLUGINS = ''",
        "def f():\n    from vllm.v1 import request as r\n    r.Request.x = 1",
        "from vllm import envs\ndel envs.x",
        "from wrapt import wrap_function_wrapper",
    ],
)
def test_a_planted_attribute_is_found(source: str) -> None:
    assert list(find_attribute_setters(source))


def find_module_level_vllm(source: str) -> list[int]:
    """Lines of imports of vLLM that run when the module is imported."""
    return [node.lineno for node in run_at_import(ast.parse(source)) if names_from_vllm(node)]


def run_at_import(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            continue
        yield child
        yield from run_at_import(child)


@pytest.mark.parametrize("file", PATCHES, ids=lambda file: file.stem)
def test_a_patch_does_not_import_vllm_at_module_level(file: Path) -> None:
    assert find_module_level_vllm(file.read_text(encoding="utf-8")) == []


def test_a_planted_module_level_import_is_found() -> None:
    assert find_module_level_vllm("try:\n    from vllm.v1 import request\nfinally:\n    pass\n") == [2]
    assert find_module_level_vllm("def build(original):\n    import vllm\n") == []


def find_version_comparisons(source: str) -> Iterator[str]:
    """Imports of `packaging`, and comparisons of anything called a version of vLLM."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            if any(name.split(".")[0] == "packaging" for name in names):
                yield f"line {node.lineno}: packaging"
        if isinstance(node, ast.Compare) and re.search(r"__version__|vllm_version|version\('vllm", ast.unparse(node)):
            yield f"line {node.lineno}: {ast.unparse(node)}"


@pytest.mark.parametrize("file", OVERLAY + PATCHES, ids=lambda file: file.relative_to(REPOSITORY).as_posix())
def test_versions_are_compared_in_compat_only(file: Path) -> None:
    assert list(find_version_comparisons(file.read_text(encoding="utf-8"))) == []


@pytest.mark.parametrize(
    "source",
    [
        "from packaging.version import Version",
        "import packaging.specifiers",
        "if vllm.__version__ >= '0.20': pass",
        "new = importlib.metadata.version('vllm') == '1'",
    ],
)
def test_a_planted_version_comparison_is_found(source: str) -> None:
    assert list(find_version_comparisons(source))


PICKLES = {"pickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
# What pickles without saying so.
CALLS_THAT_PICKLE = re.compile(
    r"torch\.(load|save)|(.*[._])?((broadcast|gather|scatter|send|recv)_object(_list)?|read_pickle|ProcessPoolExecutor)"
)


def find_pickling(source: str) -> Iterator[str]:
    """Imports of what pickles, and calls that do."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            yield from (f"line {node.lineno}: {name}" for name in names if name.split(".")[0] in PICKLES)
        if isinstance(node, ast.Call) and CALLS_THAT_PICKLE.fullmatch(ast.unparse(node.func)):
            yield f"line {node.lineno}: {ast.unparse(node.func)}"
        if isinstance(node, ast.keyword) and node.arg == "allow_pickle":
            yield f"line {node.lineno}: allow_pickle"


def test_nothing_of_ours_unpickles() -> None:
    """CASES 41."""
    sources = {file: file.read_text(encoding="utf-8") for file in OVERLAY + PATCHES + COMPAT}
    found = {file: list(find_pickling(source)) for file, source in sources.items()}
    assert {file: lines for file, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "def late():\n    from cloudpickle import loads",
        "torch.load(path)",
        "torch.distributed.all_gather_object(rows, row)",
        "dist.broadcast_object_list(rows)",
        "np.load(path, allow_pickle=True)",
    ],
)
def test_planted_pickling_is_found(source: str) -> None:
    assert list(find_pickling(source))
