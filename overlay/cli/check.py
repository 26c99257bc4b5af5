"""`vllm-overlay check`: what will happen with a model on the installed vLLM, before anything is loaded."""

from __future__ import annotations

import argparse
import gc
import json
import sys
from pathlib import Path

from vllm_overlay.check.rehearsal_options import SECONDS, RehearsalOptions
from vllm_overlay.errors import OverlayError

HELP = "Say before the long load what will happen with a model on the installed vLLM"

_TOKENS = 1_000_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", type=Path, help="a local model folder, or just its config.json")
    parser.add_argument(
        "--layers",
        metavar="IDS",
        help="eagle3, all, or ids such as 2,15,27,30 (default: VLLM_OVERLAY_LAYERS, or else eagle3)",
    )
    parser.add_argument(
        "--tensor-parallel-size", metavar="N", type=int, default=1, help="ranks that share the model (default: 1)"
    )
    parser.add_argument(
        "--tokens", metavar="N", type=int, default=_TOKENS, help=f"tokens to plan the disk for (default: {_TOKENS})"
    )
    parser.add_argument(
        "--rehearse",
        action="store_true",
        help="make the architecture small (few layers of each kind, few heads and experts), give it random weights and "
        "run it in the real engine with capture on, on the device that this vLLM is for; a minute or two on a CPU "
        "(default: read only)",
    )
    parser.add_argument(
        "--rehearse-timeout",
        metavar="SECONDS",
        type=float,
        help=f"when a rehearsal that has not ended is ended, with its processes (default: {SECONDS:.0f})",
    )
    parser.add_argument(
        "--trust-remote-code",
        action="store_true",
        help="let the rehearsal run the Python files beside config.json (default: it does not)",
    )
    parser.add_argument("--json", action="store_true", help="print the lines as JSON (default: text)")


def run(args: argparse.Namespace) -> int:
    from vllm_overlay.check.report import Plan, check, describe_failure, write_report

    given = {"--rehearse-timeout": args.rehearse_timeout is not None, "--trust-remote-code": args.trust_remote_code}
    lone = next((option for option, is_given in given.items() if is_given and not args.rehearse), None)
    if lone is not None:
        raise OverlayError(f"{lone} is of a rehearsal, which is not asked for: add --rehearse, or leave it out")
    seconds = SECONDS if args.rehearse_timeout is None else args.rehearse_timeout
    rehearsal = RehearsalOptions(seconds, args.trust_remote_code) if args.rehearse else None

    # Reading makes hundreds of thousands of syntax nodes and no garbage: looking for some takes a third of the time.
    gc.disable()
    try:
        report = check(Plan(args.model, args.layers, args.tensor_parallel_size, args.tokens, rehearsal))
    finally:
        gc.enable()
    print(json.dumps(report.to_dict(), indent=2) if args.json else "\n".join(write_report(report)))
    for line in report.failing:
        print(f"problem: {describe_failure(line)}", file=sys.stderr)
    return 1 if report.failing else 0
