"""The compile-cache key depends on the layers that are tapped."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests.patches.conftest import Apply
from vllm_overlay.patches import key_compile_cache_by_taps
from vllm_overlay.patches.key_compile_cache_by_taps import PATCH


def test_other_layers_other_key(apply: Apply, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.config import VllmConfig

    config = VllmConfig()
    stock = config.compute_hash()
    keys = []
    for layers in ("1,2", "1,3", "1,2"):
        monkeypatch.setattr(
            key_compile_cache_by_taps, "current_settings", lambda layers=layers: SimpleNamespace(layers=layers)
        )
        applied = apply(PATCH) if not keys else None
        assert applied is None or applied.replacements
        keys.append(config.compute_hash())
    assert keys[0] == keys[2]
    assert len({stock, *keys}) == 3
