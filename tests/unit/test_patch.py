"""The patch record, on a stand-in module: misfits, all or nothing, roll back, undo."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import wrapt

from vllm_overlay.compat.packages import find_lack
from vllm_overlay.patch import Patch, PatchError, Target, apply_patch, find_misfits

MODULE = "stand_in_for_vllm"
SOURCE = """
class Base:
    def inherited(self): return "base"

class Thing(Base):
    def method(self, value): return value
    @staticmethod
    def static(value): return value
    @classmethod
    def cls_method(cls, value): return cls.__name__, value

def function(value, other=1): return value
table = {"a": 1}
"""


@pytest.fixture
def module() -> Iterator[ModuleType]:
    made = ModuleType(MODULE)
    exec(SOURCE, made.__dict__)
    sys.modules[MODULE] = made
    yield made
    del sys.modules[MODULE]


def wrap(original: Any) -> Any:
    return wrapt.FunctionWrapper(original, lambda wrapped, instance, args, kwargs: ("ours", wrapped(*args, **kwargs)))


def make_patch(build: Any = wrap, verify: Any = lambda: None) -> Patch:
    return Patch(
        name="p",
        targets=(),
        vllm=">=0",
        process="worker",
        relies_on={},
        upstream="",
        remove_when="",
        build=build,
        verify=verify,
    )


def target(path: str, *parameters: str) -> Target:
    return Target(MODULE, path, parameters)


def test_targets_are_resolved_through_the_seam() -> None:
    patch = Patch(
        name="p", targets=("{WORKER}:Worker.load_model",), vllm=">=0", process="worker",
        relies_on={"{WORKER}:Worker.load_model": ("self",)}, upstream="", remove_when="", build=wrap,
        verify=lambda: None,
    )  # fmt: skip
    resolved = patch.resolve_targets(SimpleNamespace(WORKER="vllm.somewhere"))  # type: ignore[arg-type]
    assert resolved == (Target("vllm.somewhere", "Worker.load_model", ("self",)),)


def test_a_target_outside_vllm_names_its_module() -> None:
    patch = replace(make_patch(), targets=("somewhere.else:Thing.method",))
    assert patch.resolve_targets(SimpleNamespace()) == (Target("somewhere.else", "Thing.method", ()),)  # type: ignore[arg-type]


def test_a_restored_name_stands_there_until_undo(module: ModuleType) -> None:
    restored = Target(MODULE, "Thing.gone", (), lambda: "back")
    applied = apply_patch(make_patch(), (target("Thing.method"), restored))
    assert module.Thing.gone == "back"
    assert applied.undo() == []
    assert "gone" not in vars(module.Thing)


def test_a_restored_name_that_upstream_has_is_a_misfit(module: ModuleType) -> None:
    before = vars(module.Thing)["method"]
    with pytest.raises(PatchError, match=r"expected no stand_in_for_vllm:function in this release, found <function"):
        apply_patch(make_patch(), (target("Thing.method"), Target(MODULE, "function", (), lambda: "back")))
    assert vars(module.Thing)["method"] is before


@pytest.mark.parametrize("path", ["Thing.method", "Thing.static", "Thing.cls_method", "function", "table"])
def test_undo_puts_back_the_very_object(module: ModuleType, path: str) -> None:
    owner = module.Thing if path.startswith("Thing") else module
    name = path.split(".")[-1]
    before = vars(owner)[name]
    applied = apply_patch(make_patch(build=wrap if path != "table" else dict), (target(path),))
    assert vars(owner)[name] is not before
    assert applied.undo() == []
    assert vars(owner)[name] is before


def test_wrapped_functions_bind_as_before(module: ModuleType) -> None:
    apply_patch(make_patch(), (target("Thing.method"), target("Thing.static"), target("Thing.cls_method")))
    thing = module.Thing()
    assert thing.method(3) == ("ours", 3)
    assert module.Thing.static(4) == ("ours", 4)
    assert module.Thing.cls_method(5) == ("ours", ("Thing", 5))


def test_every_misfit_is_collected(module: ModuleType) -> None:
    found = find_misfits(
        (target("Thing.method", "value"), target("Thing.gone"), target("function", "value", "extra"),
         Target("no_such_module", "x", ()), target("Thing.inherited"))
    )  # fmt: skip
    assert found == [
        f"expected {MODULE}:Thing.gone, found no 'gone' defined in Thing",
        f"expected {MODULE}:function to take extra, found (value, other)",
        "expected no_such_module:x, found No module named 'no_such_module'",
        f"expected {MODULE}:Thing.inherited, found no 'inherited' defined in Thing",
    ]


def test_one_misfit_and_nothing_is_patched(module: ModuleType) -> None:
    before = vars(module.Thing)["method"]
    with pytest.raises(PatchError, match=r"patch 'p' does not fit this vLLM: expected .*Thing.gone"):
        apply_patch(make_patch(), (target("Thing.method"), target("Thing.gone")))
    assert vars(module.Thing)["method"] is before


def test_a_failed_verify_rolls_everything_back(module: ModuleType) -> None:
    def verify() -> None:
        raise RuntimeError("expected 1, found 2")

    before = vars(module.Thing)["method"], module.function
    with pytest.raises(PatchError, match="rolled back: RuntimeError: expected 1, found 2"):
        apply_patch(make_patch(verify=verify), (target("Thing.method"), target("function")))
    assert (vars(module.Thing)["method"], module.function) == before


def test_undo_leaves_what_somebody_wrapped_since(module: ModuleType) -> None:
    """CASES 36: another tool wrapped the same function; both work, and undo says what it left."""
    applied = apply_patch(make_patch(), (target("function"),))
    ours = module.function
    module.function = lambda value: ("theirs", ours(value))
    assert applied.undo() == [f"{MODULE}:function"]
    assert module.function(1) == ("theirs", ("ours", 1))


@pytest.mark.parametrize(
    ("requirement", "lack"),
    [
        ("wrapt>=1", None),
        ("wrapt", None),
        ("no-such-package==1.*", "no-such-package is not installed"),
        ("wrapt<1", f"wrapt {wrapt.__version__} is outside <1"),
    ],
)
def test_what_a_package_lacks(requirement: str, lack: str | None) -> None:
    assert find_lack(requirement) == lack
