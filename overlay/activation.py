"""Activation: from `VLLM_OVERLAY=1` to patches applied as vLLM is imported, in every process vLLM starts.

`activate` is called from the start-up line in site-packages (`vllm_overlay.pth`) and again by vLLM as the
`vllm.general_plugins` entry point: a second belt for interpreters started with -S. Both belts together patch once.
It imports nothing heavy, patches nothing and never raises: an exception in a `.pth` line is printed and the program
goes on with exit status 0. It registers import hooks, and a refusal comes from a hook as an ImportError.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import wrapt

from vllm_overlay.compat.packages import find_lack
from vllm_overlay.errors import OverlayError
from vllm_overlay.ledger import Entry, Ledger
from vllm_overlay.patch import AppliedPatch, Patch, PatchError, Target, apply_patch
from vllm_overlay.settings import SWITCH, Settings, is_enabled, read_settings

PLUGIN_NAME = "vllm_overlay"

# Modules of other packages that a patch changes and that are used before their package imports vLLM.
USED_BEFORE_VLLM = ("speculators.utils.pydantic_utils",)


class ActivationError(ImportError):
    """The overlay is switched on and cannot do its work; nothing of vLLM may be used half-patched."""


@dataclass
class Activation:
    """What this process has activated. Forked children inherit it, spawned ones build their own."""

    ledger: Ledger = field(default_factory=Ledger)
    registered: bool = False
    started: bool = False
    settings: Settings | None = None
    applied: dict[str, AppliedPatch] = field(default_factory=dict)
    undone: bool = False


_STATE = Activation()


class _Refusals:
    """A finder before all others that refuses what was refused before, with the same words.

    wrapt runs a module's hooks once: without this, a program that catches the first ImportError and imports again
    would get a stock vLLM, silently.
    """

    def __init__(self) -> None:
        self._reasons: dict[str, str] = {}

    def add(self, module: str, reason: str) -> None:
        self._reasons[module] = reason
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name in self._reasons:
            raise ActivationError(self._reasons[name])


_REFUSALS = _Refusals()


def activate() -> None:
    """Register the overlay's import hooks if `VLLM_OVERLAY=1`. Takes no argument, returns nothing, may run twice."""
    if _STATE.registered or os.environ.get(SWITCH, "0") in ("", "0"):
        return
    _STATE.registered = True
    wrapt.register_post_import_hook(_start, "vllm")
    for name in USED_BEFORE_VLLM:
        wrapt.register_post_import_hook(_import_vllm, name)
    os.register_at_fork(after_in_child=_write_ledger)


def current_ledger() -> Ledger:
    """The ledger of this process."""
    return _STATE.ledger


def current_settings() -> Settings:
    """The settings that this process was activated with. Errors: ActivationError if it was not."""
    if _STATE.settings is None:
        raise ActivationError(f"vllm-overlay is not active in this process: {SWITCH}=1 was not set when it started")
    return _STATE.settings


def note_role(role: str) -> None:
    """Record that this process runs the front end, the engine or a worker."""
    if role not in _STATE.ledger.roles:
        _STATE.ledger.roles.append(role)
        _write_ledger()


def count_old_call(patch_name: str) -> None:
    """A shim translated a call of an old form."""
    entry = _STATE.ledger.entries.get(patch_name)
    if entry is not None:
        entry.old_calls = (entry.old_calls or 0) + 1
        _write_ledger()


def require_patched(process: str) -> None:
    """Errors: ActivationError if a patch meant for this kind of process is not applied in this one."""
    gaps = _STATE.ledger.find_gaps(process)
    if gaps:
        raise ActivationError(f"vllm-overlay: this {process} process is not fully patched: {'; '.join(gaps)}")


def undo_all() -> list[str]:
    """Take every patch back, newest first. Returns the targets left because somebody wrapped them since."""
    # Hooks of modules not imported yet stay registered, here and in a forked child; they must not patch any more.
    _STATE.undone = True
    left = []
    for name in reversed(list(_STATE.applied)):
        left += _STATE.applied[name].undo()
        if not _STATE.applied[name].replacements:
            del _STATE.applied[name]
            _STATE.ledger.entries[name].state = "waiting for import"
            _STATE.ledger.entries[name].reason = "undone"
    return left


def _import_vllm(module: ModuleType) -> None:
    """The hook on a module that is used before vLLM: if a patch of ours changes it here, start now."""
    from vllm_overlay.patches import PATCHES

    patches = [patch for patch in PATCHES if any(target.startswith(f"{module.__name__}:") for target in patch.targets)]
    if any(find_lack(patch.package) is None for patch in patches) and importlib.util.find_spec("vllm") is not None:
        importlib.import_module("vllm")


def _start(vllm: ModuleType) -> None:
    """The hook on `vllm` itself: refuse, now and at every later import, or hook the modules that patches need."""
    if _STATE.started:
        return
    try:
        _hook_modules(vllm)
    except ImportError as error:
        _REFUSALS.add(vllm.__name__, str(error))
        raise


def _hook_modules(vllm: ModuleType) -> None:
    """Settle settings and release, then hook the modules that patches need."""
    from vllm_overlay.compat import releases
    from vllm_overlay.patches import PATCHES

    try:
        is_enabled()
        settings = read_settings()
    except OverlayError as error:
        raise ActivationError(f"vllm-overlay: {error}") from error
    version = str(vllm.__version__)
    release = releases.resolve_release(version, policy=settings.policy, stands_for=settings.release)
    _STATE.settings = settings
    _STATE.started = True
    ledger = _STATE.ledger
    ledger.vllm_version, ledger.release = version, release
    if settings.release is None and releases.is_newer(version):
        _give_notice(f"vLLM {version} is newer than the newest supported release and is treated as {release}")
    elif not releases.is_same_release(version, release):
        ledger.notices.append(f"vLLM {version} is treated as {release}")
    _check_plugin_filter()
    seam = releases.seam_for(release)
    for patch in PATCHES:
        _enter(patch, patch.resolve_targets(seam), _reason_not_needed(patch, settings, release))
    _write_ledger()


def _reason_not_needed(patch: Patch, settings: Settings, release: str) -> str | None:
    from vllm_overlay.compat import releases

    if patch.only_with_capture and settings.capture is None:
        return "capture is off (VLLM_OVERLAY_CAPTURE is not set)"
    if not releases.is_needed(patch.vllm, release):
        return f"vLLM {release} is outside {patch.vllm}"
    return find_lack(patch.package) if patch.package else None


def _enter(patch: Patch, targets: tuple[Target, ...], not_needed: str | None) -> None:
    names = [str(target) for target in targets]
    old_calls = 0 if patch.old_form else None
    if not_needed:
        _STATE.ledger.entries[patch.name] = Entry(
            patch.name, patch.process, "not needed here", names, not_needed, old_calls
        )
        return
    modules = sorted({target.module for target in targets})
    waiting = set(modules)
    _STATE.ledger.entries[patch.name] = Entry(
        patch.name, patch.process, "waiting for import", names, f"{', '.join(modules)} not imported", old_calls
    )

    def on_import(module: ModuleType) -> None:
        waiting.discard(module.__name__)
        if not waiting and patch.name not in _STATE.applied and not _STATE.undone:
            _apply(patch, targets, module.__name__)

    for module in modules:
        wrapt.register_post_import_hook(on_import, module)


def _apply(patch: Patch, targets: tuple[Target, ...], module: str) -> None:
    entry = _STATE.ledger.entries[patch.name]
    try:
        _STATE.applied[patch.name] = apply_patch(patch, targets)
    except PatchError as error:
        entry.state, entry.reason = "refused", str(error)
        _REFUSALS.add(module, str(error))
        _write_ledger()
        raise
    entry.state, entry.reason = "applied", ""
    _write_ledger()


def _check_plugin_filter() -> None:
    """Say so when VLLM_PLUGINS leaves the second belt out; the start-up line has done the work already."""
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is None or PLUGIN_NAME in [name.strip() for name in allowed.split(",")]:
        return
    _give_notice(
        f"VLLM_PLUGINS={allowed!r} leaves out {PLUGIN_NAME!r}: processes started with `python -S` will not be patched;"
        f" add {PLUGIN_NAME} to it"
    )


def _give_notice(text: str) -> None:
    """Print a notice to stderr (vLLM configures logging later than this) and keep it for `status`."""
    _STATE.ledger.notices.append(text)
    print(f"vllm-overlay: WARNING: {text}", file=sys.stderr)


def _write_ledger() -> None:
    if _STATE.settings is not None and _STATE.settings.ledger is not None:
        _STATE.ledger.write_to(_STATE.settings.ledger)


def load_all_targets() -> None:
    """Import every module that a patch waits for, so that each patch is applied or refused now. For `status`."""
    importlib.import_module("vllm")
    for entry in list(_STATE.ledger.entries.values()):
        if entry.state != "waiting for import" or entry.process == "any":
            continue
        for target in entry.targets:
            importlib.import_module(target.split(":")[0])


def describe_process() -> dict[str, Any]:
    """This process's ledger as plain JSON values."""
    return _STATE.ledger.to_dict()
