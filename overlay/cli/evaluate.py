"""`vllm-overlay evaluate`: acceptance of a draft on a file of prompts."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from vllm_overlay.cli.output import keep_stdout_for_result

HELP = "Measure a draft's acceptance per position and its acceptance length on a file of prompts"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("draft", metavar="DRAFT", type=Path, help="folder written by `export`")
    parser.add_argument("--model", required=True, metavar="MODEL", help="the target, a local folder")
    parser.add_argument(
        "--prompts",
        required=True,
        metavar="FILE",
        type=Path,
        help="chat JSONL; of each line the turns up to the last user's",
    )
    parser.add_argument("--draft-tokens", type=int, default=3, metavar="K", help="tokens proposed a check (default: 3)")
    parser.add_argument(
        "--max-tokens", type=int, default=128, metavar="N", help="tokens generated a prompt (default: 128)"
    )
    parser.add_argument(
        "--ignore-eos",
        action="store_true",
        help="go on after the end of a turn, so that counts compare exactly (default: stop)",
    )
    parser.add_argument("--json", action="store_true", help="print the figures as JSON (default: a table)")
    parser.epilog = "vLLM's own engine options go after --, for example: -- --dtype float32 --enforce-eager"


def run(args: argparse.Namespace) -> int:
    from vllm_overlay.dataset.prompts import read_prompts
    from vllm_overlay.offline.evaluate import EvaluationSettings, evaluate

    settings = EvaluationSettings(
        args.model, args.draft, args.draft_tokens, args.max_tokens, args.ignore_eos, tuple(args.engine_options)
    )
    with keep_stdout_for_result() as stdout:
        report = evaluate(settings, read_prompts(args.prompts, args.model))
        print(json.dumps(report, indent=2) if args.json else format_report(report), file=stdout)
    return 0


def format_report(report: dict[str, Any]) -> str:
    """The report as a small table."""
    k = report["num_draft_tokens_a_check"]
    lines = [
        f"{report['draft']} for {report['model']}, vLLM {report['vllm_version']}, {report['num_prompts']} prompts, "
        f"{k} a check",
        f"{'':16}{'checks':>8}"
        + "".join(f"{f'position {i}':>13}" for i in range(1, k + 1))
        + f"{'acceptance length':>20}",
    ]
    for name, title in (("vllm", "vLLM's counters"), ("chain", "chain in torch")):
        counts = report[name]
        if counts is None:
            lines.append(f"{title:16}not run: this vLLM does not speculate on this device")
            continue
        rates = "".join(f"{rate:>13.3f}" for rate in counts["rates"])
        lines.append(f"{title:16}{counts['num_drafts']:>8}{rates}{counts['acceptance_length']:>20.3f}")
    if report["vllm"] is not None:
        lines.append(
            f"texts equal to plain: {report['texts_equal']} of {report['num_prompts']}; tokens/s plain (capturing) "
            f"{report['plain_tokens_per_second']:.1f}, with the draft {report['speculative_tokens_per_second']:.1f}"
        )
    if report["problem"]:
        lines.append(f"PROBLEM: {report['problem']}")
    return "\n".join(lines)
