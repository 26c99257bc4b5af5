"""What the start-up line costs an interpreter when the overlay is off."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

from tests.contract.conftest import ScratchEnvironment

STARTS = 20
LIMIT_S = 0.002


def start(python: str, environment: dict[str, str]) -> float:
    began = time.perf_counter()
    subprocess.run([python, "-c", "pass"], check=True, env=environment)
    return time.perf_counter() - began


def test_an_interpreter_starts_as_fast_when_the_overlay_is_off(scratch: ScratchEnvironment, wheel: Path) -> None:
    """The quickest of 20 starts with the line and of 20 without it, taken in turn: another process on the machine can
    only slow a start, so the quickest is the cost itself. A machine busy throughout gets up to five rounds.
    """
    scratch.install("--no-deps", str(wheel))
    line = scratch.site_packages / "vllm_overlay.pth"
    aside = line.with_suffix(".aside")
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("VLLM_", "PYTHON"))}
    with_line, without = [], []
    for _ in range(5):
        for _ in range(STARTS):
            with_line.append(start(scratch.python, environment))
            line.rename(aside)
            without.append(start(scratch.python, environment))
            aside.rename(line)
        if min(with_line) - min(without) < LIMIT_S:
            break
    cost = min(with_line) - min(without)
    print(f"start-up line, overlay off: {cost * 1e3:.3f} ms a start")
    assert cost < LIMIT_S
