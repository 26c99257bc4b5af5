"""The releases that tools/ makes environments of are the ones that compat/ says we run on."""

from __future__ import annotations

from tools.environments import RELEASES
from vllm_overlay.compat.releases import SUPPORTED


def test_every_supported_release_has_an_environment() -> None:
    assert tuple(RELEASES) == SUPPORTED
