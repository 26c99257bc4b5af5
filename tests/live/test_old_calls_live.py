"""Programs written for vLLM 0.11 on this environment's vLLM, and vLLM's own calls, which no shim translates."""

from __future__ import annotations

import importlib
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

from tests.live.runs import run_python
from tests.tiny_models import END_OF_TURN, tiny_tokenizer, write_tiny_llama
from vllm_overlay.compat.releases import base_version

pytestmark = pytest.mark.live

SCRIPTS = Path(__file__).parent / "scripts"
PROMPTS = [[5, 6, 7, 8], [20, 21, 22]]
MAX_TOKENS = 8
ONE_TO_MANY_AS = "a+"
WITH_OVERLAY = {"VLLM_OVERLAY": "1"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model") / "model", layers=2)


@cache
def installed() -> Version:
    return base_version(importlib.import_module("vllm").__version__)


def run(script: str, folder: Path, plan: dict[str, Any], environment: dict[str, str]) -> Any:
    """What the script wrote. A failed run fails the test with the log's end."""
    folder.mkdir(parents=True, exist_ok=True)
    out, file = folder / "out.json", folder / "plan.json"
    file.write_text(json.dumps(plan | {"out": str(out)}))
    done = run_python([str(SCRIPTS / script), str(file)], environment)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return json.loads(out.read_text())


def run_stock(folder: Path, model: Path, environment: dict[str, str], **engine: Any) -> list[list[int]]:
    plan = {
        "engine": {"model": str(model), "dtype": "float32", "enforce_eager": True, "max_model_len": 128} | engine,
        "prompts": PROMPTS,
        "max_tokens": MAX_TOKENS,
        "regex": ONE_TO_MANY_AS,
    }
    answers: list[list[int]] = run("stock_calls.py", folder, plan, environment)
    return answers


@pytest.fixture(scope="module")
def expected(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """What vLLM generates by itself: two plain answers and a constrained one."""
    return run_stock(tmp_path_factory.mktemp("stock"), model, {})


def read_ledgers(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(file.read_text()) for file in sorted(folder.glob("*.json"))]


def count_old_calls(ledgers: list[dict[str, Any]]) -> dict[str, int]:
    """By shim, over all processes."""
    counts: dict[str, int] = {}
    for ledger in ledgers:
        for name, entry in ledger["entries"].items():
            if entry["old_calls"] is not None and entry["state"] == "applied":
                counts[name] = counts.get(name, 0) + entry["old_calls"]
    return counts


@pytest.mark.parametrize(
    ("engine", "environment", "executor"),
    [
        ({"distributed_executor_backend": "mp"}, {}, "multiproc"),
        ({}, {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}, "uniproc"),
    ],
    ids=["workers in processes", "all in one process"],
)
def test_vllms_own_calls_go_straight_through(
    model: Path,
    expected: list[list[int]],
    tmp_path: Path,
    engine: dict[str, Any],
    environment: dict[str, str],
    executor: str,
) -> None:
    ledger = {"VLLM_OVERLAY_LEDGER": str(tmp_path / "ledgers")}
    answers = run_stock(tmp_path, model, WITH_OVERLAY | ledger | environment, **engine)
    assert answers == expected
    ledgers = read_ledgers(tmp_path / "ledgers")
    assert len(ledgers) >= (1 if executor == "uniproc" else 3)
    counts = count_old_calls(ledgers)
    assert {name: count for name, count in counts.items() if count} == {}
    steps = {"finish_steps_of_uniproc", "finish_steps_of_multiproc"} if installed() >= Version("0.11.1") else set()
    assert counts.keys() >= {
        "accept_kv_cache_specs",
        "give_scheduler_block_sizes",
        "answer_to_renamed_model_methods",
        *(name for name in steps if name.endswith(executor)),
    }


def until(token_ids: list[int], last: int) -> list[int]:
    return token_ids[: token_ids.index(last) + 1] if last in token_ids else token_ids


@pytest.mark.parametrize(
    ("config", "executor", "form"),
    [
        ("by hand", "uni", "one phase"),
        ("by hand", "mp", "one phase"),
        ("engine arguments", "uni", "one phase"),
        ("by hand", "uni", "two phases"),
        ("by hand", "uni", "two phases, unasked"),
    ],
)
def test_a_program_of_2025_runs(
    model: Path, expected: list[list[int]], tmp_path: Path, config: str, executor: str, form: str
) -> None:
    """It is driven by hand, and gives vLLM's own tokens: plain ones up to its token, and constrained ones."""
    plan = {
        "model": str(model),
        "config": config,
        "executor": executor,
        "form": form,
        "prompts": PROMPTS,
        "max_tokens": MAX_TOKENS,
        "eos_token_id": expected[0][4],
        "constrained_eos_token_id": END_OF_TURN,
        "regex": ONE_TO_MANY_AS,
        "backend": "xgrammar",
    }
    environment = WITH_OVERLAY | {"VLLM_OVERLAY_LEDGER": str(tmp_path / "ledgers")}
    facts = run("old_program.py", tmp_path, plan, environment)
    answers = facts["answers"]
    for i in range(len(PROMPTS)):
        wanted = until(expected[i], plan["eos_token_id"])
        assert answers[f"plain-{i}"]["token_ids"] == wanted
        assert answers[f"plain-{i}"]["reason"] == ("stop" if plan["eos_token_id"] in wanted else "length")
    assert answers["constrained"]["token_ids"] == expected[2]
    text = tiny_tokenizer().decode(answers["constrained"]["token_ids"], skip_special_tokens=True)
    assert text and set(text) == {"a"}
    assert facts["both_names"] is (True if executor == "uni" else None)
    assert facts["empty_steps"] > 0
    counts = count_old_calls(read_ledgers(tmp_path / "ledgers"))
    check_counts(counts, config, executor, form)


def check_counts(counts: dict[str, int], config: str, executor: str, form: str) -> None:
    """That the shims did it, each where its call is an old one."""
    finished = counts.get({"uni": "finish_steps_of_uniproc", "mp": "finish_steps_of_multiproc"}[executor], 0)
    if installed() < Version("0.11.1"):
        assert (counts["split_steps"] > 0) == (form == "two phases, unasked")
        assert (counts["ask_for_grammar_by_step"] > 0) == (form != "one phase")
        return
    assert (finished > 0) == (form == "one phase")
    assert counts["take_constraints_of_sampling_params"] == 1
    if installed() >= Version("0.12"):
        assert counts["fill_scheduler_config"] == (1 if config == "by hand" else 0)
        assert counts["accept_kv_cache_specs"] == 1
    if installed() >= Version("0.20") or form == "one phase":
        assert counts["give_scheduler_block_sizes"] == 1
