"""Our variables are known to vLLM and never iterated."""

from __future__ import annotations

import pytest

from tests.patches.conftest import Apply
from vllm_overlay.patches.know_overlay_variables import PATCH
from vllm_overlay.settings import VARIABLES


def test_known_and_not_shown(apply: Apply, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm import envs

    before = list(envs.environment_variables)
    assert "VLLM_OVERLAY_CAPTURE" not in envs.environment_variables
    apply(PATCH)
    assert all(name in envs.environment_variables for name in VARIABLES)
    assert list(envs.environment_variables) == before
    monkeypatch.setenv("VLLM_OVERLAY_CAPTURE", "/a")
    assert envs.environment_variables["VLLM_OVERLAY_CAPTURE"]() == "/a"
    with pytest.raises(KeyError):
        envs.environment_variables["VLLM_NO_SUCH"]


def test_no_cache_key_changes(apply: Apply, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm import envs

    # 0.11.0 hashes a list of names that it has written down, and later releases whatever the table shows.
    read_factors = envs.compute_hash if "compute_hash" in vars(envs) else envs.compile_factors
    monkeypatch.setenv("VLLM_OVERLAY_CAPTURE", "/a")
    before = read_factors()
    apply(PATCH)
    assert read_factors() == before
