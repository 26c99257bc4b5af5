"""Each patch on the real vLLM of this environment: applied for one test, and taken back to the very originals."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import pytest

from vllm_overlay.activation import current_ledger
from vllm_overlay.compat.releases import is_needed, resolve_release, seam_for
from vllm_overlay.ledger import Entry
from vllm_overlay.patch import AppliedPatch, Patch, apply_patch

Apply = Callable[[Patch], AppliedPatch]
# Applies a shim and gives what counts its old calls; skips the test on a release that does not need it.
ApplyShim = Callable[[Patch], Callable[[], int]]


@contextmanager
def applied_patch(patch: Patch) -> Iterator[AppliedPatch]:
    vllm = importlib.import_module("vllm")
    seam = seam_for(resolve_release(vllm.__version__, policy="strict", stands_for=None))
    applied = apply_patch(patch, patch.resolve_targets(seam))
    places = list(applied.replacements)
    assert all(place.is_in_place() for place in places)
    yield applied
    assert applied.undo() == []
    for place in places:
        if place.target.restore:
            assert place.attribute not in vars(place.owner)
        else:
            assert vars(place.owner)[place.attribute] is place.original


@pytest.fixture
def apply() -> Iterator[Apply]:
    with ExitStack() as stack:
        yield lambda patch: stack.enter_context(applied_patch(patch))


@contextmanager
def applied_shim(patch: Patch) -> Iterator[Callable[[], int]]:
    vllm = importlib.import_module("vllm")
    release = resolve_release(vllm.__version__, policy="strict", stands_for=None)
    if not is_needed(patch.vllm, release):
        pytest.skip(f"vLLM {release} is outside {patch.vllm}")
    ledger = current_ledger()
    ledger.release = release
    entry = ledger.entries[patch.name] = Entry(patch.name, patch.process, "applied", [], "", 0)
    with applied_patch(patch):
        yield lambda: entry.old_calls or 0
    ledger.entries.pop(patch.name, None)


@pytest.fixture
def apply_shim() -> Iterator[ApplyShim]:
    with ExitStack() as stack:
        yield lambda patch: stack.enter_context(applied_shim(patch))
