"""What the report says of a rehearsal; the rehearsals themselves are tests/live/test_rehearse_live.py's."""

from __future__ import annotations

import json
import math
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.unit.check.conftest import KIMI_K25, LLAMA, WriteConfig
from vllm_overlay.check import rehearsal
from vllm_overlay.check.line import Line
from vllm_overlay.check.rehearsal_options import RehearsalOptions
from vllm_overlay.check.report import Plan, check, write_report
from vllm_overlay.cli import main
from vllm_overlay.errors import OverlayError
from vllm_overlay.rehearsal.defaults import DefaultsError
from vllm_overlay.rehearsal.plan import Outcome, RehearsalPlan

RUN = Outcome("equal", model_class="LlamaForCausalLM", layers=4, records=5, rows=392, difference=1e-6, ranks=1)
Answer = Callable[[Outcome], list[dict[str, Any]]]


@pytest.fixture
def answer(monkeypatch: pytest.MonkeyPatch) -> Answer:
    """Have every rehearsal come out so; returns what each is asked for."""

    def give(outcome: Outcome) -> list[dict[str, Any]]:
        asked: list[dict[str, Any]] = []

        def run(small: Any, plan: RehearsalPlan, layer_ids: Any, seconds: float, code: Path | None) -> Outcome:
            asked.append({"plan": plan, "layer_ids": layer_ids, "seconds": seconds, "code": code})
            return outcome

        monkeypatch.setattr(rehearsal, "run_bounded", run)
        monkeypatch.setattr(rehearsal, "read_defaults", lambda config, code, seconds: config.get("text_config", config))
        return asked

    return give


def lines_of(folder: Path, **plan: Any) -> dict[str, Line]:
    report = check(Plan(folder, rehearsal=RehearsalOptions(), **plan), {})
    return {line.subject: line for line in report.lines[-3:]}


def test_equal_to_transformers(answer: Answer, write_config: WriteConfig) -> None:
    (asked,) = [answer(RUN)]
    lines = lines_of(write_config(LLAMA))
    assert list(lines) == ["small model", "not rehearsed", "rehearsal"]
    assert {line.verdict for line in lines.values()} == {"ok"}
    assert lines["rehearsal"].found == (
        "LlamaForCausalLM in float32, 1 rank, 5 records with 392 rows equal to transformers'; "
        "layer ids 2, 16, 29, 32 rehearsed as 1, 2, 3, 4"
    )
    assert "hidden_size: 4096 -> 512" in lines["small model"].details.splitlines()
    assert asked[0]["layer_ids"] == (1, 2, 3, 4, 0)
    assert (asked[0]["seconds"], asked[0]["code"]) == (300.0, None)


def test_what_is_not_rehearsed_is_named(answer: Answer, write_config: WriteConfig) -> None:
    quantised = {**KIMI_K25["text_config"], "kv_lora_rank": 512, "quantization_config": {"quant_method": "awq"}}
    # 0.11.0 does not serve Kimi-K2.5, and what cannot be served is not rehearsed.
    config = {**KIMI_K25, "architectures": ["KimiVLForConditionalGeneration"], "text_config": quantised}
    asked = answer(RUN)
    line = lines_of(write_config(config), tensor_parallel_size=8)["not rehearsed"]
    assert line.verdict == "warning"
    for part in ("quantisation (awq)", "vision_config", "latent attention", "8 tensor-parallel ranks: run with 1"):
        assert part in line.found
    assert asked[0]["plan"].tensor_parallel_size == 2


def test_a_class_that_cannot_be_read_is_told(
    answer: Answer, write_config: WriteConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer(RUN)

    def refuse(config: Any, code: Any, seconds: float) -> Any:
        raise DefaultsError("no class of that name")

    monkeypatch.setattr(rehearsal, "read_defaults", refuse)
    lines = lines_of(write_config(LLAMA))
    assert (lines["small model"].verdict, lines["rehearsal"].verdict) == ("warning", "ok")
    assert "no class of that name" in lines["small model"].found


def test_kinds_of_layers_that_the_class_knows_are_kept(
    answer: Answer, write_config: WriteConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer(RUN)
    types = (["sliding_attention"] * 5 + ["full_attention"]) * 5 + ["sliding_attention"] * 2
    monkeypatch.setattr(rehearsal, "read_defaults", lambda config, code, seconds: {**LLAMA, "layer_types": types})
    line = lines_of(write_config(LLAMA))["small model"]
    assert line.verdict == "ok"
    assert line.found == "6 of 32 layers: 0, 1, 2, 3, 4, 5, counted from 0"


def test_processes_that_do_not_end_are_named(
    answer: Answer, write_config: WriteConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer(RUN)

    def stay(*arguments: Any) -> Any:
        raise OverlayError("processes 17 do not end")

    monkeypatch.setattr(rehearsal, "run_bounded", stay)
    line = lines_of(write_config(LLAMA))["rehearsal"]
    assert (line.verdict, line.found) == ("fails", "processes 17 do not end")


def test_a_model_that_dies(answer: Answer, write_config: WriteConfig) -> None:
    error = "Traceback (most recent call last):\n  File \"x.py\", line 1\nTypeError: no 'residual'"
    answer(Outcome("died", "TypeError: no 'residual' (rank 0)", error, "building the engine"))
    report = check(Plan(write_config(LLAMA), rehearsal=RehearsalOptions()), {})
    (line,) = report.failing
    assert line.found == "died while building the engine: TypeError: no 'residual' (rank 0)"
    shown = [text.strip() for text in write_report(report)]
    for text in error.splitlines():
        assert text.strip() in shown
    assert report.to_dict()["lines"][-1]["details"] == error


@pytest.mark.parametrize(
    ("outcome", "verdict", "text"),
    [
        (Outcome("wrong", "layer ids 1 and 2 hold the same states"), "fails", "report this"),
        (Outcome("died", "no end in time", timed_out=True), "fails", "--rehearse-timeout"),
        (Outcome("died", "ValueError", "please set `trust_remote_code=True`"), "fails", "--trust-remote-code"),
        (Outcome("died", "ValueError", "Free memory on device (1.0/139.8 GiB) is less"), "fails", "others hold it"),
        (Outcome("consistent", "this transformers has no class for it"), "ok", ""),
        (Outcome("consistent", "0.2 away", difference=0.2), "warning", "another model"),
        (Outcome("consistent", "vLLM's own", weights_failed="KeyError: 'odd.weight'"), "warning", "load_weights"),
        (Outcome("died", "no end in time", weights_failed="KeyError: 'odd.weight'"), "fails", "real run"),
    ],
    ids=["wrong", "hangs", "remote code", "memory", "consistent", "away", "weights", "both"],
)
def test_verdicts(outcome: Outcome, verdict: str, text: str, answer: Answer, write_config: WriteConfig) -> None:
    answer(outcome)
    line = lines_of(write_config(LLAMA))["rehearsal"]
    assert line.verdict == verdict
    assert outcome.weights_failed in line.found
    assert text in line.advice


def test_linear_attention_is_rehearsed_in_16_bits(answer: Answer, write_config: WriteConfig) -> None:
    asked = answer(RUN)
    lines_of(write_config({**LLAMA, "linear_num_key_heads": 16, "linear_num_value_heads": 32}))
    assert (asked[0]["plan"].dtype, asked[0]["plan"].from_transformers) == ("bfloat16", False)


def test_the_command(
    answer: Answer, write_config: WriteConfig, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder = write_config(LLAMA)
    words = ["check", str(folder), "--rehearse", "--rehearse-timeout", "17", "--trust-remote-code", "--json"]
    asked = answer(Outcome("died", "boom-17", stage="generating"))
    assert main(words) == 1
    printed = capsys.readouterr()
    assert json.loads(printed.out)["lines"][-1]["found"] == "died while generating: boom-17"
    assert "problem: rehearsal: expected" in printed.err
    assert (asked[0]["seconds"], asked[0]["code"]) == (17.0, folder)
    answer(RUN)
    assert main(words[:3]) == 0


@pytest.mark.parametrize("words", [["--rehearse-timeout", "17"], ["--trust-remote-code"]])
def test_options_of_a_rehearsal_that_is_not_asked_for(
    words: list[str], write_config: WriteConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", str(write_config(LLAMA)), *words]) == 1
    assert f"{words[0]} is of a rehearsal" in capsys.readouterr().err


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf])
def test_a_time_that_is_none(seconds: float, answer: Answer, write_config: WriteConfig) -> None:
    asked = answer(RUN)
    report = check(Plan(write_config(LLAMA), rehearsal=RehearsalOptions(seconds)), {})
    assert [line.subject for line in report.failing] == ["rehearsal"]
    assert asked == []


def test_nothing_is_run_of_what_fails_by_reading(answer: Answer, write_config: WriteConfig) -> None:
    asked = answer(RUN)
    report = check(Plan(write_config(LLAMA), tensor_parallel_size=3, rehearsal=RehearsalOptions()), {})
    assert [line.subject for line in report.failing] == ["tensor parallel size"]
    assert (report.lines[-1].subject, report.lines[-1].verdict, report.lines[-1].found) == (
        "rehearsal",
        "warning",
        "not run",
    )
    assert asked == []


def test_nothing_is_run_of_a_model_that_is_none(answer: Answer, tmp_path: Path) -> None:
    asked = answer(RUN)
    report = check(Plan(tmp_path / "none", rehearsal=RehearsalOptions()), {})
    assert (report.lines[-1].subject, report.lines[-1].found) == ("rehearsal", "not run")
    assert asked == []


def test_a_temporary_folder_that_is_not_there(
    write_config: WriteConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    line = lines_of(write_config(LLAMA))["rehearsal"]
    assert (line.verdict, line.advice) == ("fails", "make room, or set TMPDIR")
    assert str(tmp_path / "gone") in line.found


@pytest.mark.parametrize("stage", ["class_config", "run"])
def test_a_check_that_is_ended_leaves_no_folder(
    stage: str, write_config: WriteConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGTERM while the configuration's class is asked, and while the small model runs."""
    folders, program = tmp_path / "folders", tmp_path / "python"
    folders.mkdir()
    text = f"""#!{sys.executable}
import os, shutil, signal, sys, time
if sys.argv[2].endswith("{stage}"):
    os.kill(os.getppid(), signal.SIGTERM)
    time.sleep(600)
shutil.copy(sys.argv[3] + "/config.json", sys.argv[4])
"""
    program.write_text(text)
    program.chmod(0o755)
    monkeypatch.setattr(tempfile, "tempdir", str(folders))
    monkeypatch.setattr(sys, "executable", str(program))
    with pytest.raises(SystemExit) as exit_:
        main(["check", str(write_config(LLAMA)), "--rehearse"])
    assert exit_.value.code == 143
    assert list(folders.iterdir()) == []
