"""README.md's table of several GPUs is what the newest results hold, and says what was not run."""

from __future__ import annotations

from typing import Any

from tools.parallel_table import BEGIN, END, NOT_RUN, README, read_newest, render

BARE: dict[str, Any] = {"device": "2 x GPU", "versions": {"vllm": "0.24.0"}, "date": "2026-11-30"}


def cells(results: dict[str, Any]) -> dict[str, str]:
    lines = render(results).splitlines()[2:]
    return {title: seen for _, title, seen, _ in (map(str.strip, line.split("|")) for line in lines)}


def test_readme_holds_what_was_seen() -> None:
    text = README.read_text(encoding="utf-8")
    assert text[text.index(BEGIN) + len(BEGIN) : text.index(END)].strip() == render(read_newest())


def test_what_the_results_lack_was_not_run() -> None:
    assert set(cells(BARE).values()) == {NOT_RUN}
    assert len(cells(BARE)) == 11
    assert render(BARE | {"not_run": ["this: it failed"]}) == render(BARE) + "\n\n- this: it failed"


def test_a_workload_that_was_cut_off_was_not_run() -> None:
    prefill = {"on_over_off": 0.98114, "on_over_off_of_each_pair": [0.983, 0.979]}
    seen = cells(BARE | {"tensor_parallel_2": {"options": "", "prefill": prefill}})
    assert seen["Capture with tensor parallelism over 2: share of plain vLLM's tokens/s"] == (
        f"prefill 0.981 (2 pairs), decode {NOT_RUN}"
    )
    assert seen["Capture with pipeline parallelism over 2: the same"] == NOT_RUN


def test_the_tests_figures_are_shown() -> None:
    figures = {
        "rows, tensor": {
            "largest_relative_difference": 0.0641,
            "smallest_of_neighbouring_rows": 1.288,
            "next_token_from_the_last_state": [380, 384],
        },
        "against one GPU, tensor": {"largest_relative_difference": 0.0312},
        "replicas behind a server": {"records_by_log": [13, 11], "largest_relative_difference": 0.06},
        "a killed rank": {"what_failed_first": "rank 1 was killed by SIGKILL"},
        "curve, tiny, float32": {"largest_loss_difference": 8.5e-7},
        "resume, tiny, float32": {"equal_by_bits": True, "difference_of_one": 5.4e-7},
        "speed, shapes of 8B": {
            "largest_loss_difference": 2e-3,
            "two_over_one": 1.61,
            "two_over_one_at_the_same_tokens_a_gpu": 1.93,
        },
    }
    assert list(cells(BARE | {"figures": figures}).values())[3:] == [
        "largest relative difference from transformers' 0.064 (of neighbouring rows 1.29 at least), next token right "
        "380 of 384; from one GPU's 0.031",
        NOT_RUN,
        NOT_RUN,
        "13 and 11 records, largest relative difference 0.060",
        "the caller is told: rank 1 was killed by SIGKILL; what was committed is whole",
        "8.5e-07 apart at most in float32, 2.0e-03 apart at most in bfloat16",
        "by two: bit for bit; by one: 5.4e-07 apart",
        "1.93 with as many tokens a GPU, 1.61 at the same global batch",
    ]
