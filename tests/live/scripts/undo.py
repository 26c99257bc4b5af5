"""Every patch applied in one process, and all taken back. Prints, as JSON, what was and is at each target.

`restored` says of each target that was patched whether the very object that vLLM defined stands there again.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import sys
from typing import Any

from traces import find_traces, is_ours

ABSENT = "absent"


def read_raw(target: str) -> Any:
    """What stands at `module:Qual.name` in its owner's own dict; ABSENT if nothing does."""
    module, path = target.split(":")
    owner: Any = sys.modules[module]
    *outer, attribute = path.split(".")
    for name in outer:
        owner = getattr(owner, name)
    return vars(owner).get(attribute, ABSENT)


def is_original(now: Any, before: Any) -> bool:
    """A wrapper knows the object that it wraps; of what is not a wrapper, only that it is not ours can be told."""
    wrapped = getattr(before, "__wrapped__", None) if type(before).__name__ == "FunctionWrapper" else None
    return not is_ours(now) and (wrapped is None or wrapped is now)


def load_what_is_there(targets: list[str]) -> None:
    """Import the modules of patches that wait for something which need not be installed."""
    for target in targets:
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(target.split(":")[0])


if __name__ == "__main__":
    from vllm_overlay.activation import describe_process, load_all_targets, undo_all

    load_all_targets()
    for waiting in describe_process()["entries"].values():
        if waiting["state"] == "waiting for import" and waiting["process"] == "any":
            load_what_is_there(waiting["targets"])
    entries = describe_process()["entries"].values()
    targets = [target for entry in entries if entry["state"] == "applied" for target in entry["targets"]]
    before = {target: read_raw(target) for target in targets}
    report = {
        "waiting": [one["name"] for one in entries if one["state"] == "waiting for import" and one["process"] != "any"],
        "refused": [one["name"] for one in entries if one["state"] == "refused"],
        "patched": {target: is_ours(value) for target, value in before.items()},
        "left": undo_all(),
    }
    report["restored"] = {target: is_original(read_raw(target), value) for target, value in before.items()}
    report["traces"] = find_traces()
    print(json.dumps(report))
