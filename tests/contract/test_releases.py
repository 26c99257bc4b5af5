"""The releases that compat/ says we run on are the ones that tools/ makes environments of."""

from __future__ import annotations

from tools.environments import RELEASES
from vllm_overlay.compat.releases import SUPPORTED


def test_every_supported_release_has_an_environment() -> None:
    assert tuple(RELEASES) == SUPPORTED
