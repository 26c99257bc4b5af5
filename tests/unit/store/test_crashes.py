"""A few rounds of tools/crash_store.py; results/crashes.json beside this file has 200 kills and 200 faults."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[3] / "tools" / "crash_store.py"
SHARED_MEMORY = Path("/dev/shm")


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """In memory if there is such a place: what a killed process has written is in the page cache either way."""
    if not SHARED_MEMORY.is_dir():
        yield tmp_path / "crashes"
        return
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY, prefix="vllm-overlay-") as parent:
        yield Path(parent) / "crashes"


@pytest.mark.skipif(shutil.which("cc") is None, reason="the faults are compiled from C")
def test_kills_and_faults_lose_and_tear_nothing(folder: Path, tmp_path: Path) -> None:
    """CASES.md 19: an error with the path; nothing half-written is ever read as a record."""
    report = tmp_path / "report.json"
    command = [sys.executable, str(TOOL), "--kills", "10", "--faults", "10", "--folder", str(folder)]
    done = subprocess.run([*command, "--json", str(report)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(report.read_text())
    assert (found["kills"], found["faults"], found["wrong"]) == (10, 10, [])
    assert found["counts"]["records read"] > 100
    assert "lost or torn, or not said: 0" in done.stdout
