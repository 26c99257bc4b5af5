"""`vllm-overlay check --rehearse` on real engines: Kimi-K2.5's published config.json, and the story's three deaths.

The deaths run at the same time: each spends most of its time on imports, on one core.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.live.runs import clean_environment, list_processes

pytestmark = pytest.mark.live

SCRIPTS = Path(__file__).parent / "scripts"
KIMI_K25 = Path(__file__).resolve().parents[1] / "configs" / "kimi_k25.json"
# In the environment of every process of the runs.
MARK = "REHEARSAL_TEST"

LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "vocab_size": 128256,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
# What each dies of, and where.
DEATHS = {
    "CallsByKeyword": ("got an unexpected keyword argument 'position_ids'", "return layer(position_ids=positions"),
    "MissesMethod": ("object has no attribute 'get_rows_of_tokens'", "self.model.get_rows_of_tokens(input_ids)"),
    "MissesArgument": ("missing 1 required positional argument: 'llama_4_scaling'", "residual = layer("),
}
Reports = dict[str, tuple[int, dict[str, Any]]]


@pytest.fixture(scope="module")
def deaths(tmp_path_factory: pytest.TempPathFactory) -> Reports:
    """Exit status and JSON report of the broken models."""
    folder = tmp_path_factory.mktemp("deaths")
    install_plugin(folder / "plugin")
    for name in DEATHS:
        Path(folder, f"{name}.json").write_text(json.dumps(LLAMA | {"architectures": [name]}))
    path = os.pathsep.join([str(folder / "plugin"), str(SCRIPTS), os.environ.get("PYTHONPATH", "")])
    return rehearse(folder, {name: [str(folder / f"{name}.json")] for name in DEATHS}, {"PYTHONPATH": path})


@pytest.fixture(scope="module")
def kimi_k25(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, dict[str, Any]]:
    """Exit status and JSON report of Kimi-K2.5."""
    words = {"kimi_k25": [str(KIMI_K25), "--tensor-parallel-size", "2"]}
    return rehearse(tmp_path_factory.mktemp("kimi_k25"), words, {})["kimi_k25"]


def rehearse(folder: Path, words: dict[str, list[str]], variables: dict[str, str]) -> Reports:
    """Run the command with each of these words, all at the same time. No process may be left of them."""
    environment = clean_environment({MARK: str(folder), **variables})
    running = {name: start(name, folder, more, environment) for name, more in words.items()}
    done = {name: (process.communicate(timeout=400)[0], process.returncode) for name, process in running.items()}
    assert list_processes(MARK, str(folder)) == []
    return {name: (status, json.loads(text)) for name, (text, status) in done.items()}


def install_plugin(folder: Path) -> None:
    """As pip would leave it: what vLLM finds is its entry point."""
    facts = folder / "broken_models-1.0.dist-info"
    facts.mkdir(parents=True)
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: broken-models\nVersion: 1.0\n")
    (facts / "entry_points.txt").write_text("[vllm.general_plugins]\nbroken_models = broken_models:register\n")


def start(name: str, folder: Path, words: list[str], environment: dict[str, str]) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "vllm_overlay.cli", "check", *words, "--rehearse", "--json"]
    log = (folder / f"{name}.log").open("w")
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=log, text=True)


def find_line(report: dict[str, Any], subject: str) -> dict[str, str]:
    (line,) = [line for line in report["lines"] if line["subject"] == subject]
    return line


@pytest.mark.parametrize("name", DEATHS)
def test_a_model_that_would_die_after_the_load(name: str, deaths: Reports) -> None:
    """CASES 21: what reading cannot see, because a plug-in makes the class, dies here, and the error is whole."""
    status, report = deaths[name]
    message, code = DEATHS[name]
    (line,) = [line for line in report["lines"] if line["verdict"] == "fails"]
    assert (status, line["subject"]) == (1, "rehearsal")
    # vLLM 0.32 on a CPU does not run the model before the first request.
    assert line["found"].startswith(("died while building the engine: ", "died while generating: "))
    assert message in line["found"] and "rank 0" in line["found"]
    # torch, which calls a module's forward, is where two of the three are raised: the traceback says who called.
    assert "Traceback (most recent call last):" in line["details"]
    assert message in line["details"] and code in line["details"]


def test_kimi_k25_on_two_ranks(kimi_k25: tuple[int, dict[str, Any]]) -> None:
    """By the class that serves it, 61 layers made 4, captured as they are computed."""
    status, report = kimi_k25
    line = find_line(report, "rehearsal")
    assert (status, line["verdict"]) == (0, "ok"), line
    assert "KimiK25ForConditionalGeneration in float32, 2 ranks, 5 records with 392 rows" in line["found"]
    assert "layer ids 2, 30, 58, 61 rehearsed as 1, 2, 3, 4" in line["found"]
    left_out = find_line(report, "not rehearsed")["found"]
    assert "compressed-tensors" in left_out and "vision_config" in left_out and "latent attention" in left_out
    assert "text_config.num_hidden_layers: 61 -> 4" in find_line(report, "small model")["details"]
