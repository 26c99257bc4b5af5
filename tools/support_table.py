"""What the matrix found, one file a release in tests/live/results/matrix, and the table in README.md made of it.

`tools/matrix.py` writes the files and the table; a contract test fails when they disagree.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

REPOSITORY = Path(__file__).resolve().parent.parent
RESULTS = REPOSITORY / "tests" / "live" / "results" / "matrix"
EXPLANATIONS = RESULTS.parent / "explanations.json"
README = REPOSITORY / "README.md"
BEGIN = "<!-- The support table: written by `python3 tools/matrix.py --readme`, not by hand. -->"
END = "<!-- End of the support table. -->"

Outcome = Literal["passed", "failed", "skipped"]


@dataclass(frozen=True)
class Check:
    """A column of the table: one test of a module in tests/live, or all of them."""

    name: str
    module: str
    test: str | None = None

    @property
    def node(self) -> str:
        """As pytest takes it."""
        return f"tests/live/{self.module}.py{f'::{self.test}' if self.test else ''}"


CHECKS = (
    Check("stock", "test_matrix_live", "test_stock_without_the_variable"),
    Check("capture", "test_matrix_live", "test_every_captured_state_is_the_reference"),
    Check("text", "test_matrix_live", "test_text_is_unchanged_with_capture_on"),
    Check("old callers", "test_speculators_live"),
    Check("undo", "test_matrix_live", "test_undo_puts_the_originals_back"),
    Check("error text", "test_matrix_live", "test_error_text_is_no_less_than_stock"),
    Check("draft loads", "test_drafts_live", "test_every_tensor_is_a_parameter_and_every_parameter_a_tensor"),
    Check("draft served", "test_served_drafts_live", "test_a_draft_of_ours_is_served"),
)


@dataclass(frozen=True)
class Cell:
    """What a check came to on a release.

    `reason` is the first line of what a test that did not pass said; `notes` are what tests recorded to be shown, by
    what it is. `date` and `sources` are as those of a result, of a check that was run by itself later; empty where they
    are the result's.
    """

    outcome: Outcome
    seconds: float
    reason: str = ""
    notes: Mapping[str, str] = field(default_factory=dict)
    date: str = ""
    sources: str = ""


@dataclass(frozen=True)
class Result:
    """What the matrix found on a release.

    `versions` are what ran, by name; of vLLM what it calls itself, such as `0.16.0+cpu`.
    `sources` is the digest of the overlay and of the tests that ran. Times are in seconds, `seconds` with the making
    of the environment left out; `date` is UTC.
    """

    release: str
    date: str
    seconds: float
    sources: str
    versions: Mapping[str, str]
    cells: Mapping[str, Cell]

    def sources_of(self, check: str) -> str | None:
        """What a check's cell was made of; None if it was not run."""
        cell = self.cells.get(check)
        return None if cell is None else cell.sources or self.sources

    def write(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        draft = folder / f".{self.release}.tmp"
        draft.write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")
        draft.rename(result_file(folder, self.release))


@dataclass(frozen=True)
class Explanation:
    """Why a check cannot pass on a release, and where upstream says so."""

    release: str
    check: str
    reason: str
    link: str


def result_file(folder: Path, release: str) -> Path:
    return folder / f"{release}.json"


def read_results(folder: Path) -> dict[str, Result]:
    """By release, oldest first."""
    results = [_read_result(file) for file in folder.glob("*.json")]
    return {result.release: result for result in sorted(results, key=lambda result: sort_key(result.release))}


def _read_result(file: Path) -> Result:
    facts = json.loads(file.read_text(encoding="utf-8"))
    return Result(**facts | {"cells": {name: Cell(**cell) for name, cell in facts["cells"].items()}})


def read_explanations(file: Path) -> list[Explanation]:
    return [Explanation(**facts) for facts in json.loads(file.read_text(encoding="utf-8"))]


def sort_key(release: str) -> tuple[int, ...]:
    return tuple(map(int, release.split(".")))


def find_unexplained(results: Iterable[Result], explanations: Sequence[Explanation]) -> list[str]:
    """The red cells that upstream does not account for, as `release: check: reason`."""
    explained = {(one.release, one.check) for one in explanations}
    return [
        f"{result.release}: {name}: {cell.reason}"
        for result in results
        for name, cell in result.cells.items()
        if cell.outcome != "passed" and (result.release, name) not in explained
    ]


def render_all(results: Mapping[str, Result], explanations: Sequence[Explanation], releases: Iterable[str]) -> str:
    """The table of README.md: the results, and which releases have none."""
    missing = [release for release in releases if release not in results]
    note = f"\n\nNot run yet as a whole: {', '.join(missing)}." if missing else ""
    return render(results.values(), explanations) + note


def render(results: Iterable[Result], explanations: Sequence[Explanation]) -> str:
    """The table in Markdown, the reason for each explained cell, and a table of what tests noted."""
    rows = list(results)
    notes = _number_notes(explanations)
    numbers = {cell: number for number, cells in enumerate(notes.values(), 1) for cell in cells}
    lines = [
        f"| vLLM | run with | {' | '.join(check.name for check in CHECKS)} | seconds | date |",
        f"|---{'|---' * (len(CHECKS) + 3)}|",
    ]
    for result in rows:
        cells = [_render_cell(result, check.name, numbers) for check in CHECKS]
        facts = "torch {torch} and transformers {transformers}".format(**result.versions)
        lines.append(f"| {result.release} | {facts} | {' | '.join(cells)} | {result.seconds:.0f} | {result.date} |")
    if explanations:
        lines += ["", *(f"{number}. {note}" for number, note in enumerate(notes, 1))]
    lines += _render_notes(rows)
    return "\n".join(lines)


def _number_notes(explanations: Sequence[Explanation]) -> dict[str, list[tuple[str, str]]]:
    """The (release, check) of each note under the table: one note for all that have the same check, reason and link."""
    alike: dict[tuple[str, str, str], list[str]] = {}
    for one in explanations:
        alike.setdefault((one.check, one.reason, one.link), []).append(one.release)
    return {
        f"{', '.join(releases)}, {check}: {reason} ({link})": [(release, check) for release in releases]
        for (check, reason, link), releases in alike.items()
    }


def _render_notes(results: Sequence[Result]) -> list[str]:
    found = {
        result.release: {name: text for cell in result.cells.values() for name, text in cell.notes.items()}
        for result in results
    }
    names = list(dict.fromkeys(name for notes in found.values() for name in notes))
    if not names:
        return []
    rows = [f"| {release} | {' | '.join(notes.get(name, '') for name in names)} |" for release, notes in found.items()]
    return ["", f"| vLLM | {' | '.join(names)} |", f"|---{'|---' * len(names)}|", *rows]


def _render_cell(result: Result, check: str, numbers: Mapping[tuple[str, str], int]) -> str:
    cell = result.cells.get(check)
    if cell is None:
        return "**not run**"
    later = f", {cell.date}" if cell.date else ""
    if cell.outcome == "passed":
        return f"yes{later}"
    number = numbers.get((result.release, check))
    return f"no ({number}){later}" if number else f"**{cell.outcome}**{later}"


def read_table(text: str) -> str:
    """What stands between the two comments of a README. Errors: ValueError if they are not there."""
    return text[text.index(BEGIN) + len(BEGIN) : text.index(END)].strip("\n")
