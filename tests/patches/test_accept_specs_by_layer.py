"""The page size of specs, and of specs by layer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tests.patches.conftest import ApplyShim
from vllm_overlay.patches.accept_specs_by_layer import PATCH

SPECS: Any = [SimpleNamespace(page_size_bytes=64), SimpleNamespace(page_size_bytes=64)]


def test_both_forms(apply_shim: ApplyShim) -> None:
    from vllm.v1.core import kv_cache_utils

    old_calls = apply_shim(PATCH)
    by_layer = dict(zip(("a", "b"), SPECS, strict=True))
    assert kv_cache_utils.get_uniform_page_size(SPECS) == 64
    assert kv_cache_utils.get_uniform_page_size(kv_cache_specs=SPECS) == 64
    assert old_calls() == 0
    assert kv_cache_utils.get_uniform_page_size(by_layer) == 64
    assert kv_cache_utils.get_uniform_page_size(kv_cache_spec=by_layer) == 64
    assert old_calls() == 2
