"""The ledger: what was patched in this process, what waits, what was not needed, and what was refused, with reasons."""

from __future__ import annotations

import json
import multiprocessing
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

State = Literal["applied", "not needed here", "waiting for import", "refused"]


@dataclass
class Entry:
    """One patch in this process."""

    name: str
    process: str
    state: State
    targets: list[str]
    reason: str
    # In shims: how many calls of an old form were translated. None in other patches.
    old_calls: int | None = None


@dataclass
class Ledger:
    """All patches of one process. `roles` are the parts of vLLM seen running here: front end, engine, worker."""

    vllm_version: str = ""
    release: str = ""
    pid: int = 0
    process_name: str = ""
    roles: list[str] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    entries: dict[str, Entry] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """The ledger as plain JSON values, stamped with the process that asks (a forked child inherits the rest)."""
        self.pid = os.getpid()
        self.process_name = multiprocessing.current_process().name
        return asdict(self)

    def find_gaps(self, process: str) -> list[str]:
        """Patches meant for this kind of process that are neither applied nor unneeded, one line each."""
        gaps = []
        for entry in self.entries.values():
            if entry.process == process and entry.state not in ("applied", "not needed here"):
                gaps.append(f"{entry.name}: expected applied, found {entry.state} ({entry.reason})")
        return gaps

    def write_to(self, folder: Path) -> None:
        """Write `<pid>.json` into the folder, whole or not at all. Errors: OSError."""
        folder.mkdir(parents=True, exist_ok=True)
        facts = self.to_dict()
        draft = folder / f".{facts['pid']}.json.tmp"
        draft.write_text(json.dumps(facts, indent=2), encoding="utf-8")
        draft.rename(folder / f"{facts['pid']}.json")
