"""`import speculators` beside whatever transformers this vLLM requires, before vLLM is imported and after."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from vllm_overlay.compat.packages import find_lack
from vllm_overlay.patches.name_torch_for_speculators import PATCH

pytestmark = pytest.mark.skipif(find_lack(PATCH.package) is not None, reason=str(find_lack(PATCH.package)))


def import_speculators(overlay: str, first: str = "") -> subprocess.CompletedProcess[str]:
    code = f"{first}import speculators; print(speculators.SpeculatorModelConfig.__pydantic_complete__)"
    environment = {key: value for key, value in os.environ.items() if not key.startswith("VLLM_")}
    environment["VLLM_OVERLAY"] = overlay
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("first", ["", "import vllm; "])
def test_it_imports_and_its_configurations_are_whole(first: str) -> None:
    done = import_speculators("1", first)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines()[-1] == "True"


@pytest.mark.skipif(find_lack("transformers>=5") is not None, reason="transformers 4 names no torch")
def test_it_does_not_without_the_overlay() -> None:
    done = import_speculators("0")
    assert "name 'torch' is not defined" in done.stderr
