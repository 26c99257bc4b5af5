"""`vllm-overlay status`: what is patched here, per patch, and why not."""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import Any

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

    report = inspect_engine(args.engine, args.engine_options) if args.engine else inspect_this_process()
    if args.json:
        print(json.dumps(report, indent=2))
    else:
        _print_report(report)
    return 0 if not report["problems"] else 1


def _print_report(report: dict[str, Any]) -> None:
    for process in report["processes"]:
        roles = ", ".join(process["roles"]) or "helper"
        print(f"process {process['pid']} {process['process_name']} ({roles}): vLLM {process['vllm_version']}, ", end="")
        print(f"treated as {process['release']}")
        for notice in process["notices"]:
            print(f"  notice: {notice}")
        width = max(map(len, process["entries"]), default=0)
        for name, entry in process["entries"].items():
            reason = f": {entry['reason']}" if entry["reason"] else ""
            print(f"  {name:{width}}  {entry['process']:9}  {entry['state']}{reason}")
    for problem in report["problems"]:
        print(f"problem: {problem}", file=sys.stderr)
