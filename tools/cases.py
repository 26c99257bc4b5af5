"""Which test shows which of the cases 1 to 17 (capture) on a real engine, and what came of it on a release.

    python3 tools/cases.py --tests                       # the tests, as pytest takes them
    python -m pytest --junitxml=report.xml $(python3 tools/cases.py --tests)      # in a release's environment
    python3 tools/cases.py 0.16.0 report.xml             # writes it into tests/live/results/cases.json

A test says in its docstring which cases it shows. What they are is said there too.
"""

from __future__ import annotations

import argparse
import ast
import datetime
import json
import re
import sys
import xml.etree.ElementTree
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
LIVE = REPOSITORY / "tests" / "live"
RESULTS = LIVE / "results" / "cases.json"
CASES = range(1, 18)
# "CASES 1 (a) to (c), 2, 3: ..." is 1, 2 and 3; "CASES 1 to 4 and 16 with ..." is 1, 2, 3, 4 and 16.
NAMED = re.compile(r"CASES ((?:\d+|\([a-d]\)|to|and|,|\s)+)")
PART = re.compile(r"\([a-d]\)(?:\s+to\s+\([a-d]\))?")
NUMBERS = re.compile(r"(\d+)(?:\s+to\s+(\d+))?")


@dataclass(frozen=True)
class Shown:
    """A test of a live module and the cases that it names."""

    module: str
    name: str
    cases: tuple[int, ...]

    @property
    def node(self) -> str:
        return f"tests/live/{self.module}.py::{self.name}"


def read_cases(docstring: str) -> tuple[int, ...]:
    """The capture's cases that a docstring names, in order."""
    named = NAMED.search(docstring)
    if named is None:
        return ()
    pairs = [(int(first), int(last or first)) for first, last in NUMBERS.findall(PART.sub("", named[1]))]
    return tuple(case for first, last in pairs for case in range(first, last + 1) if case in CASES)


def list_tests(folder: Path = LIVE) -> Iterator[Shown]:
    """The tests that name a case, by module and place."""
    for file in sorted(folder.glob("test_*.py")):
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            cases = read_cases(ast.get_docstring(node) or "") if isinstance(node, ast.FunctionDef) else ()
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_") and cases:
                yield Shown(file.stem, node.name, cases)


def read_report(report: Path, tests: Sequence[Shown]) -> dict[str, list[str]]:
    """By case, what came of each test that shows it: `module::name[parameters]: passed`, with the reason if not."""
    known = {(one.module, one.name): one for one in tests}
    found: dict[str, list[str]] = {}
    for element in xml.etree.ElementTree.parse(report).iter("testcase"):
        module, name = element.get("classname", "").rpartition(".")[2], element.get("name", "")
        shown = known.get((module, name.partition("[")[0]))
        for case in shown.cases if shown else ():
            found.setdefault(str(case), []).append(f"{module}::{name}: {say_outcome(element)}")
    return found


def say_outcome(element: xml.etree.ElementTree.Element) -> str:
    """Of a test in JUnit's form."""
    for part in element:
        if part.tag in ("failure", "error", "skipped"):
            first_line = (part.get("message") or "").strip().split("\n")[0]
            return f"{'skipped' if part.tag == 'skipped' else 'failed'}: {first_line}"
    return "passed"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tests", action="store_true", help="only list the tests (default: read reports)")
    parser.add_argument("release", nargs="?", help="the release that the reports are of")
    parser.add_argument("reports", nargs="*", type=Path, metavar="REPORT", help="what pytest --junitxml wrote")
    args = parser.parse_args()
    tests = list(list_tests())
    if args.tests:
        print("\n".join(one.node for one in tests))
        return 0
    if not args.reports:
        parser.error("name a release and its reports, or give --tests")
    results = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.is_file() else {}
    found: dict[str, list[str]] = {}
    for report in args.reports:
        for case, lines in read_report(report, tests).items():
            found.setdefault(case, []).extend(lines)
    today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    results[args.release] = {"date": today, "cases": {str(case): found.get(str(case), []) for case in CASES}}
    RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    for case, lines in results[args.release]["cases"].items():
        print(f"{case:>2}  {sum(line.endswith(': passed') for line in lines)} of {len(lines)} passed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
