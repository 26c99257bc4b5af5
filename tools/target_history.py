"""What the watched names look like in every recorded release: tests/contract/targets.json.

The file holds, per name, the releases in which its look changed, each with the look from there on; the look of a name
that is nowhere in the release is `absent`. A release that moved nothing adds one line to the file.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from environments import REPOSITORY
from packaging.version import Version

from vllm_overlay.source.definitions import Definition

FILE = REPOSITORY / "tests" / "contract" / "targets.json"
REGENERATE = "python tools/targets.py regenerate"


class NotRecorded(Exception):
    """A name or a release is not in the recorded data; one line that says how to get it there."""


@dataclass(frozen=True)
class TargetHistory:
    """`distributions`: what was read of each release, oldest first. `definitions`: release, then name."""

    distributions: Mapping[str, str]
    definitions: Mapping[str, Mapping[str, Definition]]

    @property
    def releases(self) -> tuple[str, ...]:
        return tuple(self.distributions)

    def look_up(self, release: str, name: str) -> Definition:
        """What the name is in the release. Errors: NotRecorded."""
        self.check_release(release)
        if name not in self.definitions[release]:
            raise NotRecorded(f"{name} is not recorded for vLLM {release}: run `{REGENERATE}`")
        return self.definitions[release][name]

    def check_release(self, release: str) -> None:
        """Errors: NotRecorded."""
        if release not in self.distributions:
            raise NotRecorded(f"vLLM {release} is not recorded: run `{REGENERATE} {release}`")

    def with_release(self, release: str, distribution: str, looks: Mapping[str, Definition]) -> TargetHistory:
        """This history and one release more, or one read anew."""
        distributions = {**self.distributions, release: distribution}
        ordered = {one: distributions[one] for one in sorted(distributions, key=Version)}
        return TargetHistory(ordered, {**self.definitions, release: looks})


def load_history(file: Path = FILE) -> TargetHistory:
    """The recorded history; an empty one if there is no file."""
    if not file.exists():
        return TargetHistory({}, {})
    data = json.loads(file.read_text(encoding="utf-8"))
    distributions = data["releases"]
    definitions: dict[str, dict[str, Definition]] = {release: {} for release in distributions}
    for name, looks in data["names"].items():
        current: Definition | None = None
        for release in distributions:
            if release in looks:
                current = _read_look(looks[release]) if looks[release] else None
            if current is not None:
                definitions[release][name] = current
    return TargetHistory(distributions, definitions)


def save_history(history: TargetHistory, file: Path = FILE) -> None:
    """Write the file beside its place and put it there when it is whole. Each look is one line of it."""
    names = sorted({name for looks in history.definitions.values() for name in looks})
    releases = json.dumps(history.distributions, indent=1)
    entries = ",\n".join(f"{json.dumps(name)}: {{\n{_write_changes(history, name)}\n}}" for name in names)
    unfinished = file.with_suffix(".unfinished")
    unfinished.write_text(f'{{"releases": {releases},\n"names": {{\n{entries}\n}}}}\n', encoding="utf-8")
    unfinished.replace(file)


def _write_changes(history: TargetHistory, name: str) -> str:
    changes: list[str] = []
    last = "null"
    for release in history.releases:
        look = _write_look(history.definitions[release].get(name))
        if look != last:
            changes.append(f" {json.dumps(release)}: {look}")
        last = look
    return ",\n".join(changes)


def _write_look(definition: Definition | None) -> str:
    """What is not empty, but for the place: the line changes in every release. `null`: the name is not recorded."""
    if definition is None:
        return "null"
    return json.dumps({key: value for key, value in dataclasses.asdict(definition).items() if value and key != "place"})


def _read_look(values: Mapping[str, Any]) -> Definition:
    arguments: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in values.items()
    }
    return Definition(**arguments)
