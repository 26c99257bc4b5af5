"""Every seam module exports the same names, and what they say of this environment's vLLM holds."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

from vllm_overlay.compat.releases import SEAMS, SUPPORTED, Seam, resolve_release, seam_for

NAMES = {*Seam.__annotations__, *(name for name in vars(Seam) if not name.startswith("_"))}


@pytest.mark.parametrize("release", SUPPORTED)
def test_every_seam_exports_every_name(release: str) -> None:
    seam = seam_for(release)
    assert len(NAMES) > 10
    assert [name for name in sorted(NAMES) if not hasattr(seam, name)] == []


def test_every_seam_serves_a_supported_release() -> None:
    assert [first for first, _ in SEAMS] == [first for first, _ in SEAMS if first in SUPPORTED]
    assert len({seam_for(release) for release in SUPPORTED}) == len(SEAMS)  # type: ignore[type-var]


@pytest.fixture
def seam() -> Any:
    vllm = importlib.import_module("vllm")
    return seam_for(resolve_release(vllm.__version__, policy="strict", stands_for=None))


def test_the_callers_request_id_is_found_in_the_engines(seam: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_DISABLE_REQUEST_ID_RANDOMIZATION", raising=False)
    assert seam.external_request_id("17-0a1b2c3d") == "17"
    assert seam.external_request_id("job-deadbeef-0a1b2c3d") == "job-deadbeef"
    envs = importlib.import_module("vllm.envs")
    if "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION" in envs.environment_variables:
        monkeypatch.setenv("VLLM_DISABLE_REQUEST_ID_RANDOMIZATION", "1")
        assert seam.external_request_id("job-deadbeef") == "job-deadbeef"
