"""tools/cases.py: what a docstring names, and what a report says of it."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def cases() -> ModuleType:
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.syspath_prepend(str(REPOSITORY / "tools"))
        return importlib.import_module("cases")


@pytest.mark.parametrize(
    ("docstring", "named"),
    [
        ("CASES 9: hooks that nobody calls.", (9,)),
        ("CASES 1 (a) to (c), 2, 3: ids 0..N, 40 prompts of 1..40 tokens.", (1, 2, 3)),
        ("CASES 1 to 4 and 16 with the old consumer of 0.11.", (1, 2, 3, 4, 16)),
        ("CASES 20: 60 items; 21 to 24 are elsewhere.", ()),
        ("Nothing of 1 to 17.", ()),
    ],
)
def test_the_cases_that_a_docstring_names(cases: ModuleType, docstring: str, named: tuple[int, ...]) -> None:
    assert cases.read_cases(docstring) == named


def test_every_case_is_named_by_a_test_of_a_real_engine(cases: ModuleType) -> None:
    assert {case for test in cases.list_tests() for case in test.cases} == set(range(1, 18))


def test_what_came_of_each_test_is_found_by_its_case(cases: ModuleType, tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text(
        '<testsuites><testsuite><testcase classname="tests.live.test_a_live" name="test_one[x]"/>'
        '<testcase classname="tests.live.test_a_live" name="test_two"><skipped message="why&#10;so"/></testcase>'
        '<testcase classname="tests.live.test_b_live" name="test_one"><failure message="no"/></testcase>'
        "</testsuite></testsuites>"
    )
    tests = [cases.Shown("test_a_live", "test_one", (1, 2)), cases.Shown("test_a_live", "test_two", (2,))]
    assert cases.read_report(report, tests) == {
        "1": ["test_a_live::test_one[x]: passed"],
        "2": ["test_a_live::test_one[x]: passed", "test_a_live::test_two: skipped: why"],
    }
