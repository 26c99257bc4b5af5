"""`vllm-overlay check` in a process of its own: quick, and without torch, vLLM or transformers."""

from __future__ import annotations

import importlib.util
import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import vllm_overlay
from tests.unit.check.conftest import DEEPSEEK, LLAMA

LIMIT_S = 2.0
KIMI_K25 = json.loads(Path(__file__).resolve().parents[1].joinpath("configs", "kimi_k25.json").read_text())

# numpy is a second's import where it is cold.
HEAVY = ("torch", "vllm", "transformers", "numpy")

RUN = f"""
import sys
from vllm_overlay.cli import main
status = main(["check", *sys.argv[1:]])
loaded = [name for name in {HEAVY!r} if name in sys.modules]
print("loaded:", *loaded, file=sys.stderr)
sys.exit(status)
"""


def run_check(*words: str) -> tuple[subprocess.CompletedProcess[str], float]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")}
    environment["PYTHONPATH"] = str(Path(vllm_overlay.__path__[0]).parent)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-c", RUN, *words], env=environment, text=True, capture_output=True, check=False
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return done, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def is_in_registry(config: dict[str, Any]) -> bool:
    """Whether this vLLM serves the architecture: 0.11.0 has no Kimi-K2.5."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None and spec.submodule_search_locations
    registry = Path(spec.submodule_search_locations[0]) / "model_executor/models/registry.py"
    return f'"{config["architectures"][0]}"' in registry.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "config",
    [
        dict(LLAMA),
        {**DEEPSEEK, "architectures": ["DeepseekV3ForCausalLM"]},
        KIMI_K25,
        {**LLAMA, "architectures": ["LamaFor"]},
    ],
    ids=["llama", "deepseek_v3", "kimi_k25", "unknown"],
)
def test_it_answers_within_two_seconds_and_imports_nothing_heavy(config: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    seconds = []
    for _ in range(3):
        done, elapsed = run_check(str(tmp_path), "--json")
        seconds.append(elapsed)
        assert done.returncode == (0 if is_in_registry(config) else 1), done.stderr
        assert done.stderr.splitlines()[-1].strip() == "loaded:"
        assert json.loads(done.stdout)["would_fail"] == bool(done.returncode)
    # CPU seconds, and the best of three: machines that check a change do other things too.
    assert min(seconds) < LIMIT_S, seconds


def test_without_vllm_it_says_so_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA), encoding="utf-8")
    packages = str(Path(vllm_overlay.__path__[0]).parent)
    hide = "import importlib.machinery as m; f = m.PathFinder.find_spec\n"
    hide += "m.PathFinder.find_spec = lambda name, *words: None if name == 'vllm' else f(name, *words)\n"
    done = subprocess.run(
        [sys.executable, "-c", hide + RUN, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": packages},
        text=True,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 1
    problems = [line for line in done.stderr.splitlines() if not line.startswith("loaded:")]
    assert len(problems) == 1
    assert "found no vLLM in this environment" in problems[0]
