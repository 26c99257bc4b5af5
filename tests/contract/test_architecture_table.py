"""README.md's table of architectures is what the runs found, and nothing else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tools.architecture_table import (
    BEGIN,
    CAPTURED,
    END,
    README,
    RESULTS,
    Results,
    Row,
    column_of,
    leave_out_folders,
    read_results,
    read_table,
    render,
)
from tools.readme_table import replace_table
from vllm_overlay.compat.releases import SUPPORTED

NEWEST = "0.32.0"
# What the issue names, and 100 in all.
NAMED = (
    "LlamaForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
    "Qwen3NextForCausalLM",
    "MixtralForCausalLM",
    "DeepseekV2ForCausalLM",
    "DeepseekV3ForCausalLM",
    "Glm4MoeForCausalLM",
    "GptOssForCausalLM",
    "Gemma2ForCausalLM",
    "Gemma3ForCausalLM",
    "Gemma4ForCausalLM",
    "Phi3ForCausalLM",
    "GraniteForCausalLM",
    "GraniteMoeForCausalLM",
    "KimiK25ForConditionalGeneration",
    "KimiLinearForCausalLM",
    "Olmo2ForCausalLM",
    "FalconForCausalLM",
    "GPT2LMHeadModel",
    "OPTForCausalLM",
    "FalconH1ForCausalLM",
    "Mamba2ForCausalLM",
    "Gemma3ForConditionalGeneration",
    "Qwen2VLForConditionalGeneration",
)
EQUAL = Row(
    "equal", "", "llama.LlamaForCausalLM", "LlamaConfig", "float32", 4, 72, 1e-6, 0.0, 1e-7, 9.0, "2026-11-29", "abc"
)
REFUSED = replace(EQUAL, verdict="refused", reason="hc_mult=4: several <streams> | mixed")
FOUND = Results(
    NEWEST, {"vllm": NEWEST}, "command", 1e-4, {"B": REFUSED, "a": EQUAL, "c": replace(EQUAL, verdict="fails")}
)


def test_the_readme_has_the_table_of_the_results() -> None:
    table = render(read_results(RESULTS))
    assert read_table(README.read_text(encoding="utf-8")) == table, "run: python3 tools/architectures.py --readme"


def test_results_are_of_supported_releases() -> None:
    assert {one.release for one in read_results(RESULTS)} <= set(SUPPORTED)


def test_a_hundred_architectures_of_the_newest_release_are_captured() -> None:
    [newest] = [one for one in read_results(RESULTS) if one.release == NEWEST]
    captured = {name for name, row in newest.architectures.items() if row.verdict in CAPTURED}
    assert len(captured) >= 100
    assert set(NAMED) <= captured


def test_what_is_equal_is_within_the_tolerance_and_every_row_that_is_not_says_why() -> None:
    for one in read_results(RESULTS):
        for name, row in one.architectures.items():
            if row.verdict == "equal":
                assert row.difference is not None, name
                assert row.difference <= one.tolerance, name
            else:
                assert row.reason, name


def test_counts_and_cells() -> None:
    lines = render([FOUND]).splitlines()
    assert lines[2] == f"| {NEWEST} | 3 | 1 | 1 | 0 | 1 | 0 | 1 |"
    assert [line for line in lines if line.startswith(("| a |", "| B |"))] == [
        "| a | equal |",
        "| B | refused: hc_mult=4: several &lt;streams> / mixed |",
    ]
    assert column_of(replace(EQUAL, verdict="differs")) == "open"
    stood_in = replace(FOUND, architectures={"K": replace(EQUAL, reason="in plain torch")})
    assert "| K | equal (in plain torch) |" in render([stood_in]).splitlines()


def test_the_table_is_put_between_its_comments_and_results_are_read_back(tmp_path: Path) -> None:
    text = f"before\n\n{BEGIN}\n\nold\n\n{END}\nafter\n"
    assert read_table(replace_table(text, BEGIN, "new", END)) == "new"
    FOUND.write(tmp_path)
    replace(FOUND, release="0.16.0").write(tmp_path)
    assert read_results(tmp_path) == [replace(FOUND, release="0.16.0"), FOUND]


def test_no_reason_names_a_folder_of_the_machine_it_was_run_on() -> None:
    reasons = [row.reason for results in read_results(RESULTS) for row in results.architectures.values()]
    assert any(reasons)
    assert [reason for reason in reasons if leave_out_folders(reason) != reason] == []
    said = leave_out_folders("cannot import it from (/a/b-1/c/__init__.py), see https://x.dev/2.1/v/e")
    assert said == "cannot import it from (__init__.py), see https://x.dev/2.1/v/e"
