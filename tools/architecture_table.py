"""What tools/architectures.py found, one file of results a release, and README's table of it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
RESULTS = REPOSITORY / "tests" / "live" / "results" / "architectures"
README = REPOSITORY / "README.md"
BEGIN = "<!-- The table of architectures: written by `python3 tools/architectures.py --readme`, not by hand. -->"
END = "<!-- End of the table of architectures. -->"

# The verdicts in the order of the table, and what README says of each.
COLUMNS: Mapping[str, str] = {
    "equal": "of them equal to transformers",
    "consistent": "of them self-consistent",
    "refused": "refused by name",
    "cannot be built": "vLLM fails on it without us",
    "open": "open",
}
CAPTURED = ("equal", "consistent")


@dataclass(frozen=True)
class Row:
    """What a run showed of one architecture, as architecture_run.py's Finding.

    `digest` is that of the sources that it depends on; `date` is UTC.
    """

    verdict: str
    reason: str
    engine_class: str
    config: str
    dtype: str
    layers: int
    rows: int
    difference: float | None
    head: float | None
    logprobs: float | None
    seconds: float
    date: str
    digest: str


@dataclass(frozen=True)
class Results:
    """A release's architectures. `tolerance` is relative to a row's own size."""

    release: str
    versions: Mapping[str, str]
    command: str
    tolerance: float
    architectures: Mapping[str, Row]

    def write(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        facts = asdict(self) | {
            "architectures": {name: asdict(row) for name, row in sorted(self.architectures.items())}
        }
        draft = folder / f".{self.release}.tmp"
        draft.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
        draft.rename(folder / f"{self.release}.json")


def leave_out_folders(text: str) -> str:
    """The text with files by their names: results are committed, and the folders are those of one machine."""
    return re.sub(r"(?<![\w/:.])(?:/[\w.@+-]+)+/([\w.-]+)", r"\1", text)


def read_results(folder: Path) -> list[Results]:
    """Oldest release first."""
    found = [_read(json.loads(file.read_text(encoding="utf-8"))) for file in folder.glob("*.json")]
    return sorted(found, key=lambda one: tuple(map(int, one.release.split("."))))


def _read(facts: dict[str, Any]) -> Results:
    return Results(**facts | {"architectures": {name: Row(**row) for name, row in facts["architectures"].items()}})


def column_of(row: Row) -> str:
    return row.verdict if row.verdict in COLUMNS else "open"


def render(results: Sequence[Results]) -> str:
    """The counts, and one line an architecture, folded away."""
    lines = [
        f"| vLLM | architectures | captured | {' | '.join(COLUMNS.values())} |",
        f"|---{'|---' * (len(COLUMNS) + 2)}|",
    ]
    for one in results:
        rows = one.architectures.values()
        captured = sum(row.verdict in CAPTURED for row in rows)
        counts = [len(rows), captured, *(sum(column_of(row) == column for row in rows) for column in COLUMNS)]
        lines.append(f"| {one.release} | {' | '.join(map(str, counts))} |")
    lines += ["", "<details>", "<summary>Each architecture</summary>", ""]
    lines.append(f"| architecture | {' | '.join(one.release for one in results)} |")
    lines.append(f"|---{'|---' * len(results)}|")
    for name in sorted({name for one in results for name in one.architectures}, key=lambda name: (name.lower(), name)):
        cells = [_render_cell(one.architectures.get(name)) for one in results]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", "</details>"])


def _render_cell(row: Row | None) -> str:
    if row is None:
        return "not in it"
    reason = " ".join(row.reason.replace("|", "/").replace("<", "&lt;").split())
    if row.verdict in CAPTURED:
        return f"{row.verdict} ({reason})" if reason else row.verdict
    return f"{row.verdict}: {reason}"


def read_table(text: str) -> str:
    """What stands between the two comments of a README. Errors: ValueError if they are not there."""
    return text[text.index(BEGIN) + len(BEGIN) : text.index(END)].strip("\n")
