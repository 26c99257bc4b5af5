"""The patch record: how a change to vLLM is described, checked, made and taken back.

A patch is data (`Patch`) beside two functions. Its life: `find_misfits` collects everything that does not fit the
installed vLLM, `apply` replaces every target or none, `verify` must agree, and `undo` puts the originals back where
what stands there is still ours. This module is the only one that sets an attribute on vLLM.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Literal

from vllm_overlay.compat.releases import Seam

# "any": whichever process imports the targets, if one does; for modules of other packages than vLLM.
Process = Literal["front end", "engine", "worker", "any"]

_ABSENT: Any = object()


class PatchError(ImportError):
    """A patch does not fit or did not hold. An ImportError, so that importing the patched module fails."""


@dataclass(frozen=True)
class Restoration:
    """A name that this release no longer has, put back for old callers: `{SEAM_NAME}:Qual.name` and what stands there.

    It must be absent: a name that upstream has again is a misfit, not something to write over.
    """

    place: str
    build: Callable[[], Any]


@dataclass(frozen=True)
class Patch:
    """One behaviour changed in vLLM.

    `targets` are `{SEAM_NAME}:Qual.name`, the place a name of `compat.Seam`, or `module:Qual.name` of another package.
    `old_form` is set in shims: the call of an older release that is answered here. Shims count the calls they
    translate with `activation.count_old_call`; vLLM's own calls go straight through and are not counted.
    `package` is the requirement, such as `speculators==0.3.*`, of a patch whose targets belong to another package.
    """

    name: str
    targets: tuple[str, ...]
    vllm: str
    process: Process
    relies_on: Mapping[str, tuple[str, ...]]
    upstream: str
    remove_when: str
    build: Callable[[Any], Any]
    verify: Callable[[], None]
    only_with_capture: bool = False
    restores: tuple[Restoration, ...] = ()
    old_form: str = ""
    package: str = ""

    def resolve_targets(self, seam: Seam) -> tuple[Target, ...]:
        """The targets, and then the places of what is restored, in the release that `seam` serves."""
        replaced = [Target(*_resolve(target, seam), self.relies_on.get(target, ())) for target in self.targets]
        restored = [Target(*_resolve(one.place, seam), (), one.build) for one in self.restores]
        return (*replaced, *restored)


@dataclass(frozen=True)
class Target:
    """One binding to replace: `path` inside `module`, and the parameters the wrapper uses.

    With `restore` it is a binding to make, where none may be.
    """

    module: str
    path: str
    parameters: tuple[str, ...]
    restore: Callable[[], Any] | None = None

    def __str__(self) -> str:
        return f"{self.module}:{self.path}"


def _resolve(target: str, seam: Seam) -> tuple[str, str]:
    """(module, path) of a target."""
    place, path = target.split(":")
    return (getattr(seam, place.strip("{}")) if place.startswith("{") else place), path


@dataclass
class Replacement:
    """A binding that was replaced: its owner, the raw original (as it stood in the owner's dict), and ours.

    The original of a restored name is that there was none.
    """

    target: Target
    owner: Any
    attribute: str
    original: Any
    ours: Any

    def is_in_place(self) -> bool:
        """Whether what stands there now is still what we put there."""
        return _look_up_raw(self.owner, self.attribute) is self.ours

    def take_back(self) -> None:
        """The owner as it was before, and modules that took ours from it by a `from` import."""
        if self.original is _ABSENT:
            delattr(self.owner, self.attribute)
            return
        setattr(self.owner, self.attribute, self.original)
        if isinstance(self.owner, ModuleType):
            for module in [one for one in sys.modules.values() if isinstance(one, ModuleType)]:
                if _look_up_raw(module, self.attribute) is self.ours:
                    setattr(module, self.attribute, self.original)


@dataclass
class AppliedPatch:
    """A patch that is in place, and what it takes to undo it."""

    patch: Patch
    replacements: list[Replacement] = field(default_factory=list)

    def undo(self) -> list[str]:
        """Put the originals back, last first. Returns the targets left alone because somebody wrapped them since."""
        left = []
        for replacement in reversed(self.replacements):
            if not replacement.is_in_place():
                left.append(str(replacement.target))
                continue
            replacement.take_back()
        self.replacements = [r for r in self.replacements if str(r.target) in left]
        return left


def find_misfits(targets: tuple[Target, ...]) -> list[str]:
    """Everything about these targets that does not fit the installed vLLM, as `expected ..., found ...` lines."""
    misfits = []
    for target in targets:
        misfit = _find_misfit(target)
        if misfit:
            misfits.append(misfit)
    return misfits


def apply_patch(patch: Patch, targets: tuple[Target, ...]) -> AppliedPatch:
    """Replace every target, verify, and on any failure put everything back.

    Errors: PatchError naming each misfit, or what `verify` found.
    """
    misfits = find_misfits(targets)
    if misfits:
        raise PatchError(f"vllm-overlay: patch {patch.name!r} does not fit this vLLM: {'; '.join(misfits)}")
    applied = AppliedPatch(patch)
    try:
        for target in targets:
            owner, attribute = _locate(target)
            original = _look_up_raw(owner, attribute)
            ours = target.restore() if target.restore else patch.build(original)
            setattr(owner, attribute, ours)
            applied.replacements.append(Replacement(target, owner, attribute, original, ours))
        patch.verify()
    except Exception as error:
        applied.undo()
        raise PatchError(
            f"vllm-overlay: patch {patch.name!r} was rolled back: {type(error).__name__}: {error}"
        ) from error
    return applied


def _find_misfit(target: Target) -> str | None:
    try:
        owner, attribute = _locate(target)
    except (ImportError, AttributeError) as error:
        return f"expected {target}, found {error}"
    original = _look_up_raw(owner, attribute)
    if target.restore:
        return None if original is _ABSENT else f"expected no {target} in this release, found {original!r}"
    if original is _ABSENT:
        return f"expected {target}, found no {attribute!r} defined in {_describe(owner)}"
    if not target.parameters:
        return None
    parameters = inspect.signature(original).parameters
    missing = [name for name in target.parameters if name not in parameters]
    if missing:
        return f"expected {target} to take {', '.join(missing)}, found ({', '.join(parameters)})"
    return None


def _locate(target: Target) -> tuple[Any, str]:
    """The object that holds the binding, and the binding's name."""
    owner: Any = sys.modules.get(target.module) or importlib.import_module(target.module)
    *outer, attribute = target.path.split(".")
    for name in outer:
        owner = getattr(owner, name)
    return owner, attribute


def _look_up_raw(owner: Any, attribute: str) -> Any:
    """The binding as it stands in the owner's own dict: a descriptor stays one, an inherited name is absent.

    getattr would bind a method or unwrap a staticmethod, and putting that back would not restore the original.
    """
    return vars(owner).get(attribute, _ABSENT)


def _describe(owner: Any) -> str:
    name = getattr(owner, "__qualname__", None) or getattr(owner, "__name__", repr(owner))
    return str(name)
