"""README's table of what was run on several GPUs, from the newest results, which say what was not.

usage: python tools/parallel_table.py           # prints the table
       python tools/parallel_table.py --readme  # writes it into README.md

The results, tests/gpu/results/*-h200-x2.json, hold tools/benchmark.py's comparisons by name, and under `figures` the
lines that tests/gpu/test_parallel_gpu.py and test_fsdp_gpu.py write into $GPU_RESULTS/figures.jsonl, by theirs. Below
the table stand the lines of `not_run`: what failed, did not end, or was left out.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from readme_table import replace_table

REPOSITORY = Path(__file__).resolve().parent.parent
RESULTS = REPOSITORY / "tests" / "gpu" / "results"
README = REPOSITORY / "README.md"
BEGIN = "<!-- The table of several GPUs: written by `python3 tools/parallel_table.py --readme`, not by hand. -->"
END = "<!-- End of the table of several GPUs. -->"
NOT_RUN = "not run, or not to its end"

BENCHMARKS = {
    "tensor_parallel_2": "Capture with tensor parallelism over 2: share of plain vLLM's tokens/s",
    "pipeline_parallel_2": "Capture with pipeline parallelism over 2: the same",
    "two_replicas": "Capture by two replicas: the same",
}


def read_newest(folder: Path = RESULTS) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(max(folder.glob("*-h200-x2.json")).read_text(encoding="utf-8"))
    return content


def render(results: Mapping[str, Any]) -> str:
    figures = results.get("figures", {})
    rows = [(title, describe_benchmark(results.get(name, {}))) for name, title in BENCHMARKS.items()]
    rows += [
        ("Rows, tensor parallelism over 2", describe_rows(figures, "tensor")),
        ("Rows, pipeline parallelism over 2", describe_rows(figures, "pipeline")),
        ("Rows, MLA and experts spread over 2", describe_rows(figures, "experts")),
        ("Two data-parallel engines behind one server", describe_replicas(figures.get("replicas behind a server"))),
        ("A rank that is killed during capture", describe_killed(figures.get("a killed rank"))),
        ("Training by FSDP2: losses of two GPUs and of one", describe_curve(figures)),
        ("Training, a killed run goes on", describe_resumed(figures.get("resume, tiny, float32"))),
        ("Training, tokens/s of two GPUs over one's", describe_speed(figures.get("speed, shapes of 8B"))),
    ]
    head = f"| {results['device']}, vLLM {results['versions']['vllm']}, {results['date']} | what was seen |"
    table = [head, "|---|---|", *(f"| {title} | {seen or NOT_RUN} |" for title, seen in rows)]
    return "\n".join([*table, "", *(f"- {line}" for line in results.get("not_run", []))]).rstrip()


def describe_benchmark(sides: Mapping[str, Any]) -> str:
    if not any(name in sides for name in ("prefill", "decode")):
        return ""
    return ", ".join(f"{name} {describe_share(sides.get(name))}" for name in ("prefill", "decode"))


def describe_share(workload: Mapping[str, Any] | None) -> str:
    if workload is None:
        return NOT_RUN
    return f"{workload['on_over_off']:.3f} ({len(workload['on_over_off_of_each_pair'])} pairs)"


def describe_rows(figures: Mapping[str, Any], ranks: str) -> str:
    rows, against_one = figures.get(f"rows, {ranks}"), figures.get(f"against one GPU, {ranks}")
    if rows is None:
        return ""
    right, total = rows["next_token_from_the_last_state"]
    seen = (
        f"largest relative difference from transformers' {rows['largest_relative_difference']:.3f} (of neighbouring "
        f"rows {rows['smallest_of_neighbouring_rows']:.2f} at least), next token right {right} of {total}"
    )
    if against_one is None:
        return seen
    return f"{seen}; from one GPU's {against_one['largest_relative_difference']:.3f}"


def describe_replicas(figures: Mapping[str, Any] | None) -> str:
    if figures is None:
        return ""
    counts = " and ".join(map(str, figures["records_by_log"]))
    return f"{counts} records, largest relative difference {figures['largest_relative_difference']:.3f}"


def describe_killed(figures: Mapping[str, Any] | None) -> str:
    return "" if figures is None else f"the caller is told: {figures['what_failed_first']}; what was committed is whole"


def describe_curve(figures: Mapping[str, Any]) -> str:
    """The tests hold float32 to 1e-4 or less, and bfloat16 to what they say."""
    found = [
        f"{figures[name]['largest_loss_difference']:.1e} apart at most in {what}"
        for name, what in (("curve, tiny, float32", "float32"), ("speed, shapes of 8B", "bfloat16"))
        if name in figures
    ]
    return ", ".join(found)


def describe_resumed(figures: Mapping[str, Any] | None) -> str:
    if figures is None:
        return ""
    by_two = "bit for bit" if figures["equal_by_bits"] else f"{figures['difference_of_two']:.1e} apart"
    return f"by two: {by_two}; by one: {figures['difference_of_one']:.1e} apart"


def describe_speed(figures: Mapping[str, Any] | None) -> str:
    if figures is None:
        return ""
    return (
        f"{figures['two_over_one_at_the_same_tokens_a_gpu']:.2f} with as many tokens a GPU, "
        f"{figures['two_over_one']:.2f} at the same global batch"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--readme", action="store_true", help="write it into README.md")
    args = parser.parse_args()
    table = render(read_newest())
    if args.readme:
        README.write_text(replace_table(README.read_text(encoding="utf-8"), BEGIN, table, END), encoding="utf-8")
    else:
        print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
