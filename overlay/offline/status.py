"""Ledgers of this process, or of every process of a real engine."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm_overlay import activation
from vllm_overlay.errors import OverlayError

PROCESSES = ("front end", "engine", "worker")


def inspect_this_process() -> dict[str, Any]:
    """Import what the patches wait for and report each one. Refusals are reported, not raised."""
    activation.activate()
    problems = []
    try:
        activation.load_all_targets()
    except ImportError as error:
        problems.append(str(error))
    ledger = activation.describe_process()
    for entry in ledger["entries"].values():
        # Its targets are in modules that only some programs import.
        waits = entry["process"] == "any" and entry["state"] == "waiting for import"
        if entry["state"] not in ("applied", "not needed here") and not waits and not problems:
            problems.append(f"{entry['name']}: {entry['state']} ({entry['reason']})")
    return {"processes": [ledger], "problems": problems}


def inspect_engine(model: str, options: Sequence[str]) -> dict[str, Any]:
    """Run one token through a real engine with capture on, and report the ledger of each of its processes.

    A patch is a problem where no process of its kind has it applied. Errors: OverlayError when the engine does not run.
    """
    with tempfile.TemporaryDirectory(prefix="vllm-overlay-status-") as folder:
        os.environ["VLLM_OVERLAY_LEDGER"] = f"{folder}/ledgers"
        os.environ["VLLM_OVERLAY_CAPTURE"] = f"{folder}/store"
        os.environ["VLLM_OVERLAY_LAYERS"] = "all"
        _run_one_token(model, options)
        ledgers = [json.loads(file.read_text()) for file in sorted(Path(folder, "ledgers").glob("*.json"))]
    for ledger in ledgers:
        if ledger["pid"] == os.getpid():
            ledger["roles"].insert(0, "front end")
    return {"processes": ledgers, "problems": _find_problems(ledgers)}


def _run_one_token(model: str, options: Sequence[str]) -> None:
    activation.activate()
    from vllm_overlay.offline.engine import build_engine, shut_down

    llm = build_engine(model, options)
    try:
        from vllm import SamplingParams

        llm.generate([{"prompt_token_ids": [1, 2, 3]}], SamplingParams(max_tokens=1, detokenize=False), use_tqdm=False)
    finally:
        shut_down(llm)


def _find_problems(ledgers: list[dict[str, Any]]) -> list[str]:
    if not ledgers:
        raise OverlayError("no process wrote a ledger: the start-up line vllm_overlay.pth is not in this environment")
    problems = []
    for process in PROCESSES:
        of_kind = [ledger for ledger in ledgers if process in ledger["roles"]]
        if not of_kind:
            problems.append(f"expected a {process} process, found none among {len(ledgers)} processes")
        for ledger in of_kind:
            for entry in ledger["entries"].values():
                if entry["process"] == process and entry["state"] not in ("applied", "not needed here"):
                    problems.append(
                        f"{process} {ledger['pid']}: {entry['name']} is {entry['state']}: {entry['reason']}"
                    )
    return problems
