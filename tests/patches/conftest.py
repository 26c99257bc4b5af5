"""Each patch on the real vLLM of this environment: applied for one test, and taken back to the very originals."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import pytest

from vllm_overlay.compat.releases import resolve_release, seam_for
from vllm_overlay.patch import AppliedPatch, Patch, apply_patch

Apply = Callable[[Patch], AppliedPatch]


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
        assert vars(place.owner)[place.attribute] is place.original


@pytest.fixture
def apply() -> Iterator[Apply]:
    with ExitStack() as stack:
        yield lambda patch: stack.enter_context(applied_patch(patch))
