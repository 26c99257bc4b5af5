"""Which test shows which of the cases 1 to 17 (capture), 25 to 34, 40 and 41 (drafts), and what came of it by release.

    python3 tools/cases.py --tests                       # the tests, as pytest takes them
    python -m pytest --junitxml=report.xml $(python3 tools/cases.py --tests)      # in a release's environment
    python3 tools/cases.py 0.16.0 report.xml             # writes it into tests/live/results/cases.json
    python3 tools/cases.py --anew 0.16.0 report.xml      # the same, of a whole run: what was known of 0.16.0 goes first

A test says in its docstring which cases it shows. What they are is said there too. A report may be of some of the
tests, or of some of a test's parameters: what is known of the others stays, and the parameters of which it stays are
named. Where both know one, the later counts, whatever came of it. What goes is a test that is no longer there, the
line without parameters of one that has some now, and the other way about; parameters that are no longer there go with
--anew. The date of a release is that of its last report.
"""

from __future__ import annotations

import argparse
import ast
import datetime
import json
import re
import sys
import xml.etree.ElementTree
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
TESTS = REPOSITORY / "tests"
RESULTS = TESTS / "live" / "results" / "cases.json"
CAPTURE = tuple(range(1, 18))
DRAFTS = (*range(25, 35), 40, 41)
# By folder, what its tests can show: of a captured row, only a real engine can.
FOLDERS = {"live": CAPTURE + DRAFTS, "eagle3": DRAFTS, "unit": DRAFTS, "contract": DRAFTS}
# "CASES 1 (a) to (c), 2, 3: ..." is 1, 2 and 3; "CASES 1 to 4 and 16 with ..." is 1, 2, 3, 4 and 16.
NAMED = re.compile(r"CASES ((?:\d+|\([a-d]\)|to|and|,|\s)+)")
PART = re.compile(r"\([a-d]\)(?:\s+to\s+\([a-d]\))?")
NUMBERS = re.compile(r"(\d+)(?:\s+to\s+(\d+))?")
# A line is a test's name, `title` or `title[parameters]`, and what came of it.
LINE = re.compile(r"(?P<name>[\w/]+::\w+(?:\[.*?\])?): (?:passed$|(?:failed|skipped): )")


@dataclass(frozen=True)
class Shown:
    """A test and the cases that it shows. title: `folder/module::name`, under tests."""

    title: str
    cases: tuple[int, ...]

    @property
    def node(self) -> str:
        return f"tests/{self.title.replace('::', '.py::')}"


def read_cases(docstring: str) -> tuple[int, ...]:
    """The cases that a docstring names, in order."""
    named = NAMED.search(docstring)
    if named is None:
        return ()
    pairs = [(int(first), int(last or first)) for first, last in NUMBERS.findall(PART.sub("", named[1]))]
    return tuple(case for first, last in pairs for case in range(first, last + 1))


def list_tests() -> Iterator[Shown]:
    """The tests that show a case, by folder, module and place."""
    for folder, can_be_shown in FOLDERS.items():
        for file in sorted((TESTS / folder).rglob("test_*.py")):
            module = file.relative_to(TESTS).with_suffix("").as_posix()
            for node in ast.parse(file.read_text(encoding="utf-8")).body:
                if not isinstance(node, ast.FunctionDef) or not node.name.startswith("test_"):
                    continue
                cases = tuple(case for case in read_cases(ast.get_docstring(node) or "") if case in can_be_shown)
                if cases:
                    yield Shown(f"{module}::{node.name}", cases)


def read_report(report: Path) -> dict[str, list[str]]:
    """By title, what came of each test: `title[parameters]: passed`, with the reason if not."""
    found: dict[str, list[str]] = {}
    for element in xml.etree.ElementTree.parse(report).iter("testcase"):
        module = element.get("classname", "").removeprefix("tests.").replace(".", "/")
        name = element.get("name", "")
        title = f"{module}::{name.partition('[')[0]}"
        found.setdefault(title, []).append(f"{module}::{name}: {say_outcome(element)}")
    return found


def say_outcome(element: xml.etree.ElementTree.Element) -> str:
    """Of a test in JUnit's form."""
    for part in element:
        if part.tag in ("failure", "error", "skipped"):
            first_line = (part.get("message") or "").strip().split("\n")[0]
            return f"{'skipped' if part.tag == 'skipped' else 'failed'}: {first_line}"
    return "passed"


def merge(
    known: Mapping[str, Sequence[str]], found: Mapping[str, list[str]], tests: Sequence[Shown]
) -> dict[str, list[str]]:
    """By case, the lines of the tests that show it: those found, and those known of tests and parameters not found."""
    by_title: dict[str, dict[str, str]] = {}
    for line in dict.fromkeys(line for lines in known.values() for line in lines):
        name = name_of(line)
        by_title.setdefault(title_of(name), {})[name] = line
    for title, lines in found.items():
        later = {name_of(line): line for line in lines}
        has_parameters = title not in later
        earlier = by_title.get(title, {})
        by_title[title] = {name: line for name, line in earlier.items() if has_parameters == (name != title)} | later
    return {
        str(case): [line for one in tests if case in one.cases for line in by_title.get(one.title, {}).values()]
        for case in CAPTURE + DRAFTS
    }


def name_of(line: str) -> str:
    """Of the test, with its parameters, that a line is of."""
    match = LINE.match(line)
    if match is None:
        raise ValueError(f"not a test and what came of it: {line!r}")
    return match["name"]


def title_of(name: str) -> str:
    return name.partition("[")[0]


def list_kept(cases: Mapping[str, Sequence[str]], found: Mapping[str, list[str]]) -> list[str]:
    """The tests with parameters that `cases` has and the reports do not, though they have other parameters of them."""
    now = {name_of(line) for lines in found.values() for line in lines}
    names = dict.fromkeys(name_of(line) for lines in cases.values() for line in lines)
    return [name for name in names if name not in now and title_of(name) in found]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tests", action="store_true", help="only list the tests (default: read reports)")
    parser.add_argument(
        "--anew", action="store_true", help="forget what is known of the release first (default: add to it)"
    )
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
    cases = {} if args.anew else results.get(args.release, {}).get("cases", {})
    found: dict[str, list[str]] = {}
    for report in args.reports:
        of_report = read_report(report)
        cases = merge(cases, of_report, tests)
        found = {title: found.get(title, []) + of_report.get(title, []) for title in found | of_report}
    today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    results[args.release] = {"date": today, "cases": cases}
    RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    for case, lines in cases.items():
        print(f"{case:>2}  {sum(line.endswith(': passed') for line in lines)} of {len(lines)} passed")
    for name in list_kept(cases, found):
        print(f"kept from before, not in the reports: {name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
