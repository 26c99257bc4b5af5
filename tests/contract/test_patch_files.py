"""The files in patches/ all read the same, each has its test, and each is registered."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.contract.conftest import REPOSITORY
from vllm_overlay.compat import releases
from vllm_overlay.patches import PATCHES

FILES = sorted(file for file in (REPOSITORY / "patches").glob("*.py") if file.stem != "__init__")


def read_order(source: str) -> list[str]:
    """Of docstring, build, verify and PATCH those that the module has at its top level, in their order."""
    tree = ast.parse(source)
    order = ["docstring"] if ast.get_docstring(tree) else []
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name in ("build", "verify"):
            order.append(node.name)
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "PATCH" for t in node.targets):
            order.append("PATCH")
    return order


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_patch_file_has_docstring_build_verify_and_patch_in_that_order(file: Path) -> None:
    source = file.read_text(encoding="utf-8")
    assert read_order(source) == ["docstring", "build", "verify", "PATCH"]
    assert isinstance(ast.parse(source).body[-1], ast.Assign), "PATCH comes last"


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_patch_file_has_its_test(file: Path) -> None:
    assert (REPOSITORY / "tests" / "patches" / f"test_{file.stem}.py").is_file()


def test_every_test_of_a_patch_has_its_patch() -> None:
    tests = {file.stem.removeprefix("test_") for file in (REPOSITORY / "tests" / "patches").glob("test_*.py")}
    assert tests == {file.stem for file in FILES}


def test_every_patch_file_is_registered_under_its_own_name() -> None:
    assert sorted(patch.name for patch in PATCHES) == [file.stem for file in FILES]


@pytest.mark.parametrize("release", [*releases.RELEASES, *releases.READ])
def test_no_target_is_in_two_patches_of_a_release(release: str) -> None:
    needed = [patch for patch in PATCHES if releases.is_needed(patch.vllm, release)]
    targets = [str(target) for patch in needed for target in patch.resolve_targets(releases.seam_for(release))]
    assert len(set(targets)) == len(targets)


def test_parameters_are_relied_on_of_targets_only() -> None:
    assert all(set(patch.relies_on) <= set(patch.targets) for patch in PATCHES)


def test_the_check_sees_a_wrong_order() -> None:
    assert read_order('"""x"""\nPATCH = 1\ndef verify(): ...\n') == ["docstring", "PATCH", "verify"]
