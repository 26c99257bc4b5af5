"""`vllm-overlay status`: what is patched here, per patch, and why not."""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import Any

from vllm_overlay.cli.output import keep_stdout_for_result

HELP = "What is patched here, per patch, and why not"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print the ledgers as JSON (default: a table)")
    parser.add_argument(
        "--engine",
        metavar="MODEL",
        help="start a real engine with this model, capture one token into a temporary store, and report every process "
        "of its tree; vLLM's own options go after -- (default: report this process only)",
    )


def run(args: argparse.Namespace) -> int:
    os.environ["VLLM_OVERLAY"] = "1"
    from vllm_overlay.offline.status import inspect_engine, inspect_this_process

    with keep_stdout_for_result() as stdout:
        report = inspect_engine(args.engine, args.engine_options) if args.engine else inspect_this_process()
        print(json.dumps(report, indent=2) if args.json else format_report(report), file=stdout)
    for problem in report["problems"]:
        print(f"problem: {problem}", file=sys.stderr)
    return 0 if not report["problems"] else 1


def format_report(report: dict[str, Any]) -> str:
    """A line a process and a line a patch."""
    lines = []
    for process in report["processes"]:
        roles = ", ".join(process["roles"]) or "helper"
        lines.append(
            f"process {process['pid']} {process['process_name']} ({roles}): vLLM {process['vllm_version']}, "
            f"treated as {process['release']}"
        )
        for notice in process["notices"]:
            lines.append(f"  notice: {notice}")
        width = max(map(len, process["entries"]), default=0)
        for name, entry in process["entries"].items():
            reason = f": {entry['reason']}" if entry["reason"] else ""
            lines.append(f"  {name:{width}}  {entry['process']:9}  {entry['state']}{reason}")
    return "\n".join(lines)
