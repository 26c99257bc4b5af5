"""The releases that compat/ says we run on are the ones that tools/ makes environments of and README.md names."""

from __future__ import annotations

import re

from tests.contract.conftest import REPOSITORY
from tools.environments import RELEASES
from vllm_overlay.compat.releases import SUPPORTED


def test_every_supported_release_has_an_environment() -> None:
    assert tuple(RELEASES) == SUPPORTED


def test_the_readme_names_every_supported_release_and_its_torch() -> None:
    text = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+\.\d+\.\d+) \| .*?torch ([\d.]+) ", text, re.MULTILINE)
    assert rows == [(release.vllm, release.torch) for release in RELEASES.values()]
