"""speculators 0.3, imported beside any transformers, with the overlay off as in all tests of a single patch."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

import pytest
import wrapt

from vllm_overlay.compat.packages import find_lack
from vllm_overlay.compat.releases import resolve_release, seam_for
from vllm_overlay.patch import apply_patch
from vllm_overlay.patches.name_torch_for_speculators import PATCH


def import_old_consumer(module: str) -> ModuleType:
    """`speculators.data_generation.<module>`; skips the test where speculators 0.3 is not installed."""
    lack = find_lack(PATCH.package)
    if lack:
        pytest.skip(lack)
    if "speculators" not in sys.modules:
        # It does not import beside transformers 5 without this patch, which must be in place before it is through.
        wrapt.register_post_import_hook(_name_torch, "speculators.utils.pydantic_utils")
    return importlib.import_module(f"speculators.data_generation.{module}")


def _name_torch(module: ModuleType) -> None:
    vllm = importlib.import_module("vllm")
    apply_patch(
        PATCH, PATCH.resolve_targets(seam_for(resolve_release(vllm.__version__, policy="strict", stands_for=None)))
    )
