"""tools/cases.py: what a docstring names, and what a report says of it."""

from __future__ import annotations

import importlib
import json
import sys
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
        ("CASES 20: 60 items; 21 to 24 are elsewhere.", (20,)),
        ("Nothing of 1 to 17.", ()),
    ],
)
def test_the_cases_that_a_docstring_names(cases: ModuleType, docstring: str, named: tuple[int, ...]) -> None:
    assert cases.read_cases(docstring) == named


def test_every_case_is_named_by_a_test(cases: ModuleType) -> None:
    tests = list(cases.list_tests())
    of_engines = {case for test in tests if test.title.startswith("live/") for case in test.cases}
    assert of_engines >= {*range(1, 18), 34, 41}, "of these a test of a real vLLM"
    assert {case for test in tests for case in test.cases} == {*range(1, 18), *range(25, 35), 40, 41}


def test_a_captured_row_is_shown_by_a_real_engine_only(
    cases: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = 'def test_one() -> None:\n    """CASES 13, 30 and 99."""\n\n\ndef helper() -> None:\n    """CASES 31."""\n'
    for folder in ("live", "eagle3", "unit/store", "gpu"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "test_a.py").write_text(text)
    monkeypatch.setattr(cases, "TESTS", tmp_path)
    shown = [(test.node, test.cases) for test in cases.list_tests()]
    assert shown == [
        ("tests/live/test_a.py::test_one", (13, 30)),
        ("tests/eagle3/test_a.py::test_one", (30,)),
        ("tests/unit/store/test_a.py::test_one", (30,)),
    ]


def test_what_came_of_each_test_is_found_by_its_title(cases: ModuleType, tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text(
        '<testsuites><testsuite><testcase classname="tests.live.test_a_live" name="test_one[x: y]"/>'
        '<testcase classname="tests.live.test_a_live" name="test_one[z]"><skipped message="why&#10;so"/></testcase>'
        '<testcase classname="tests.unit.store.test_b" name="test_one"><failure message="no"/></testcase>'
        "</testsuite></testsuites>"
    )
    assert cases.read_report(report) == {
        "live/test_a_live::test_one": [
            "live/test_a_live::test_one[x: y]: passed",
            "live/test_a_live::test_one[z]: skipped: why",
        ],
        "unit/store/test_b::test_one": ["unit/store/test_b::test_one: failed: no"],
    }


def test_a_report_of_some_tests_leaves_what_is_known_of_the_others(cases: ModuleType) -> None:
    known = {
        "1": ["live/a::test_one[x]: passed", "live/a::test_one[y: z]: passed", "live/a::test_two: passed"],
        "2": ["live/a::test_two: passed", "live/a::test_gone: passed"],
    }
    found = {
        "live/a::test_one": ["live/a::test_one[x]: failed: no", "live/a::test_one[w]: skipped: [y: z]: passed"],
        "live/a::test_other": ["live/a::test_other: passed"],
    }
    tests = [cases.Shown("live/a::test_two", (1, 3)), cases.Shown("live/a::test_one", (1,))]
    merged = cases.merge(known, found, tests)
    assert list(merged) == [str(case) for case in (*range(1, 18), *range(25, 35), 40, 41)]
    assert {case: lines for case, lines in merged.items() if lines} == {
        "1": [
            "live/a::test_two: passed",
            "live/a::test_one[x]: failed: no",
            "live/a::test_one[y: z]: passed",
            "live/a::test_one[w]: skipped: [y: z]: passed",
        ],
        "3": ["live/a::test_two: passed"],
    }
    assert cases.list_kept(merged, found) == ["live/a::test_one[y: z]"]


@pytest.mark.parametrize(("was", "now"), [("test_one", "test_one[x]"), ("test_one[x]", "test_one")])
def test_a_test_that_takes_parameters_now_or_none_any_more_is_another(cases: ModuleType, was: str, now: str) -> None:
    known, found = {"1": [f"live/a::{was}: passed"]}, {"live/a::test_one": [f"live/a::{now}: passed"]}
    merged = cases.merge(known, found, [cases.Shown("live/a::test_one", (1,))])
    assert merged["1"] == [f"live/a::{now}: passed"]


def test_a_shorter_report_drops_nothing_unless_it_is_told_to(
    cases: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def record(*words: str, names: str) -> dict[str, list[str]]:
        elements = (f'<testcase classname="tests.live.a" name="{name}"/>' for name in names.split())
        (tmp_path / "report.xml").write_text(f"<testsuite>{''.join(elements)}</testsuite>")
        monkeypatch.setattr(sys, "argv", ["cases.py", *words, "0.1.0", str(tmp_path / "report.xml")])
        assert cases.main() == 0
        written: dict[str, list[str]] = json.loads((tmp_path / "cases.json").read_text())["0.1.0"]["cases"]
        return written

    monkeypatch.setattr(cases, "RESULTS", tmp_path / "cases.json")
    shown = [cases.Shown("live/a::test_one", (1,)), cases.Shown("live/a::test_two", (2,))]
    monkeypatch.setattr(cases, "list_tests", lambda: shown)
    whole = record(names="test_one[x] test_one[y] test_two")
    assert (len(whole["1"]), len(whole["2"])) == (2, 1)
    assert "kept" not in capsys.readouterr().out
    assert record(names="test_one[x]") == whole
    assert "kept from before, not in the reports: live/a::test_one[y]\n" in capsys.readouterr().out
    anew = record("--anew", names="test_one[x]")
    assert (anew["1"], anew["2"]) == (["live/a::test_one[x]: passed"], [])
