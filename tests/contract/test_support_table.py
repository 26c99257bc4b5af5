"""README.md's support table is what the matrix found, on every supported release and on no other."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tools.readme_table import replace_table
from tools.support_table import (
    BEGIN,
    CHECKS,
    END,
    EXPLANATIONS,
    README,
    RESULTS,
    Cell,
    Explanation,
    Result,
    find_unexplained,
    read_explanations,
    read_results,
    read_table,
    render,
    render_all,
)
from vllm_overlay.compat.releases import SUPPORTED, seam_for

VERSIONS = {"vllm": "0.16.0+cpu", "torch": "2.10.0", "transformers": "4.57.6", "python": "3.11.7"}
GREEN = Result("0.16.0", "2026-11-29", 100.4, "abc", VERSIONS, {check.name: Cell("passed", 1.0) for check in CHECKS})
RED = replace(GREEN, release="0.18.1", cells=dict(GREEN.cells) | {"undo": Cell("failed", 2.0, "test_undo: 1 left")})
REASON = Explanation("0.18.1", "undo", "it cannot", "https://example.org/issue")


def test_a_release_that_has_a_result_is_supported() -> None:
    assert set(read_results(RESULTS)) <= set(SUPPORTED)


def test_a_release_that_has_no_result_is_named() -> None:
    assert render_all({"0.16.0": GREEN}, [], ["0.16.0", "0.18.1"]).endswith("\n\nNot run yet as a whole: 0.18.1.")
    assert render_all({"0.16.0": GREEN}, [], ["0.16.0"]) == render([GREEN], [])


def test_the_readme_has_the_table_of_the_results() -> None:
    table = render_all(read_results(RESULTS), read_explanations(EXPLANATIONS), SUPPORTED)
    assert read_table(README.read_text(encoding="utf-8")) == table, "run: python3 tools/matrix.py --readme"


def test_every_red_cell_is_explained_with_a_link_and_nothing_else_is() -> None:
    results = read_results(RESULTS)
    explanations = read_explanations(EXPLANATIONS)
    assert find_unexplained(results.values(), explanations) == []
    for one in explanations:
        assert results[one.release].cells[one.check].outcome != "passed", one
        assert one.link.startswith("https://"), one


def test_vllms_counters_are_read_on_a_cpu_only_where_a_draft_was_served() -> None:
    cells = {release: result.cells.get("draft served") for release, result in read_results(RESULTS).items()}
    served = {release for release, cell in cells.items() if cell is not None and cell.outcome == "passed"}
    read = {release for release in SUPPORTED if seam_for(release).SPECULATIVE_DECODING_ON_CPU}
    # Each has its seam with a release that cannot.
    assert served - read == {"0.22.1", "0.31.0"}
    assert read <= served


def test_a_red_cell_is_one_until_it_is_explained() -> None:
    assert find_unexplained([GREEN], []) == []
    assert find_unexplained([GREEN, RED], []) == ["0.18.1: undo: test_undo: 1 left"]
    assert find_unexplained([RED], [REASON]) == []


def test_a_row_says_what_ran_and_what_came_of_it() -> None:
    header, _, green, red, _, note = render([GREEN, RED], [REASON]).splitlines()
    assert header.startswith("| vLLM | run with | stock |")
    assert green.startswith("| 0.16.0 | torch 2.10.0 and transformers 4.57.6 | yes |")
    assert green.endswith("| yes | 100 | 2026-11-29 |")
    assert "no (1)" in red
    assert note == "1. 0.18.1, undo: it cannot (https://example.org/issue)"
    assert "**failed**" in render([RED], [])


def test_a_note_is_of_all_releases_with_the_same_reason() -> None:
    later = replace(RED, release="0.19.1")
    other = Explanation("0.18.1", "text", "it cannot", "https://example.org/issue")
    cells = dict(RED.cells) | {"text": Cell("skipped", 0.0)}
    lines = render([replace(RED, cells=cells), later], [REASON, other, replace(REASON, release="0.19.1")]).splitlines()
    assert "| no (2) | yes | no (1) |" in lines[2]
    assert "| yes | yes | no (1) |" in lines[3]
    assert lines[5:] == [
        "1. 0.18.1, 0.19.1, undo: it cannot (https://example.org/issue)",
        "2. 0.18.1, text: it cannot (https://example.org/issue)",
    ]


def test_a_check_that_was_run_by_itself_has_a_date_and_sources_of_its_own() -> None:
    later = Cell("passed", 1.0, date="2026-11-30", sources="def")
    found = replace(GREEN, cells=dict(GREEN.cells) | {"text": later})
    assert "| yes | yes | yes, 2026-11-30 | yes |" in render([found], []).splitlines()[2]
    assert (found.sources_of("text"), found.sources_of("undo"), found.sources_of("other")) == ("def", "abc", None)


def test_what_tests_noted_is_a_table_of_its_own() -> None:
    noted = replace(GREEN, cells=dict(GREEN.cells) | {"old callers": Cell("passed", 1.0, notes={"without us": "dies"})})
    assert render([noted, RED], []).splitlines()[-4:] == [
        "| vLLM | without us |",
        "|---|---|",
        "| 0.16.0 | dies |",
        "| 0.18.1 |  |",
    ]


def test_the_table_is_put_between_its_comments() -> None:
    text = f"before\n\n{BEGIN}\n\nold\n\n{END}\nafter\n"
    assert replace_table(text, BEGIN, "new", END) == text.replace("old", "new")
    assert read_table(replace_table(text, BEGIN, "new", END)) == "new"
    with pytest.raises(ValueError, match="not found"):
        replace_table("no comments", BEGIN, "new", END)


def test_results_are_read_back_oldest_release_first(tmp_path: Path) -> None:
    for release in ("0.12.0", "0.11.1", "0.9.9"):
        replace(RED, release=release).write(tmp_path)
    assert list(read_results(tmp_path)) == ["0.9.9", "0.11.1", "0.12.0"]
    assert read_results(tmp_path)["0.11.1"] == replace(RED, release="0.11.1")
