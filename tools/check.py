"""Every check of the project: style, types, import walls, and the tests, on three of the supported vLLM releases.

    sh tools/check.sh                        # all of it; what .ci/run does
    sh tools/check.sh --release 0.20.2       # on one release, any that has an environment
    sh tools/check.sh --without-engines      # all but the live tests

The other releases are matrix.py's; the contract tests know all of them from committed data. The tests of training and
of stores, and types, run with the oldest and the newest of the three; `LIVE` says which live tests run where.

Types, walls and tests look at what the built wheel installs, not at the working tree. A check that fails does not stop
the others; the last line says which failed.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from environments import RELEASES, REPOSITORY, NoInterpreter, NoLibrary, make_environment, run_variables

PYPROJECT = str(REPOSITORY / "pyproject.toml")
WITHOUT_ENGINES = ("tests/unit", "tests/patches")
# What they test is ours and torch's, but for two forms of an export: with the oldest and the newest of the checked.
OF_TORCH = {"tests of training": ("tests/eagle3",), "tests of stores": ("tests/unit/store", "tests/unit/dataset")}
# Once: they look at the tree, at what is built of it, or at numbers and files alone, not at the vLLM that is installed.
WITHOUT_VLLM = ("tests/contract", "tests/unit/test_step_streams.py", "tests/unit/store/test_crashes.py")

NEWEST = "0.32.0"
# The oldest line, which computes a step in one phase; one in the middle, without Model Runner V2; the newest.
CHECKED = ("0.11.0", "0.16.0", NEWEST)
ENDS = (CHECKED[0], NEWEST)


# Checks run two at a time: mypy and pytest keep one core busy, and an engine's processes start one after the other.
LANES = 2


@dataclass(frozen=True)
class LiveModule:
    """A module of tests/live. It runs on every release, or on some only, where what it tests does not vary."""

    name: str
    why: str
    only_on: tuple[str, ...] = ()


# The longest first, so that no lane is left with one at the end.
LIVE = (
    LiveModule("test_commands_live", "our own commands: of vLLM they use what capture uses", (NEWEST,)),
    LiveModule("test_compiled_live", "two compilations; where the cache's key is made is tests/patches'", (NEWEST,)),
    LiveModule("test_speculators_live", "old callers meet other walls on every release"),
    LiveModule("test_old_calls_live", "every call form at once, on the release that has moved furthest", (NEWEST,)),
    LiveModule("test_capture_live", "more cases of what test_matrix_live shows on every release", (NEWEST,)),
    LiveModule("test_cases_live", "cases with a model or a cache of their own; others by tools/cases.py", (NEWEST,)),
    LiveModule("test_errors_live", "six engines that die; the error of a step is test_matrix_live's too", (NEWEST,)),
    LiveModule("test_parallel_live", "which rank holds which layers, and what a stage is told", ("0.16.0", NEWEST)),
    LiveModule("test_rehearse_live", "how a model dies, and what a CPU can build, varies", ("0.16.0", NEWEST)),
    LiveModule("test_matrix_live", "what every release must show"),
    LiveModule("test_architectures_live", "layers of many kinds, whose code differs by release", ("0.16.0", NEWEST)),
    LiveModule("test_status_live", "it looks for our own patches in processes of ours", (NEWEST,)),
    LiveModule("test_serve_live", "the server above the engine ends it in other ways", ("0.16.0", NEWEST)),
    LiveModule("test_smollm2_live", "the model, not the release, is what it adds", (NEWEST,)),
    LiveModule("test_served_drafts_live", "a CPU serves drafts there; the others are the matrix's", (NEWEST,)),
    LiveModule("test_ray_live", "skipped where Ray is not installed, as in the environments of the checks", (NEWEST,)),
    LiveModule("test_drafts_live", "the newest draft class takes every form; others by tools/cases.py", (NEWEST,)),
    LiveModule("test_prepare_live", "our own command; its one engine generates as any does", (NEWEST,)),
)


@dataclass(frozen=True)
class Check:
    """A command that must exit with 0, run in `folder`."""

    name: str
    command: Sequence[str]
    folder: Path


@dataclass(frozen=True)
class Job:
    """A check on a release, and the environment variables of its command."""

    release: str
    check: Check
    variables: dict[str, str]


def list_single_checks(bin_folder: Path) -> list[Check]:
    """What does not depend on the vLLM release."""
    ruff = str(bin_folder / "ruff")
    tools = [str(file) for file in sorted((REPOSITORY / "tools").glob("*.py"))]
    return [
        Check("ruff", [ruff, "check", "."], REPOSITORY),
        Check("format", [ruff, "format", "--check", "."], REPOSITORY),
        Check("types of tools", [str(bin_folder / "mypy"), "--config-file", PYPROJECT, *tools], REPOSITORY),
        Check("tests that run once", [*pytest_of(bin_folder), *WITHOUT_VLLM], REPOSITORY),
    ]


def list_release_checks(release: str, bin_folder: Path, elsewhere: Path) -> list[Check]:
    """What is run on a release without an engine. In `elsewhere` the working tree cannot be imported."""
    of_torch = [path for folders in OF_TORCH.values() for path in folders]
    left_out = [f"--ignore={path}" for path in (*WITHOUT_VLLM, *of_torch)]
    tests = Check("tests", [*pytest_of(bin_folder), *WITHOUT_ENGINES, *left_out], REPOSITORY)
    types = [str(bin_folder / "mypy"), "--config-file", PYPROJECT, "-p", "vllm_overlay"]
    walls = [str(bin_folder / "lint-imports"), "--no-cache", "--config", PYPROJECT]
    if release not in ENDS:
        return [tests, Check("walls", walls, elsewhere)]
    once = [f"--ignore={path}" for path in WITHOUT_VLLM]
    return [
        tests,
        *(Check(name, [*pytest_of(bin_folder), *folders, *once], REPOSITORY) for name, folders in OF_TORCH.items()),
        Check("types", types, elsewhere),
        Check("walls", walls, elsewhere),
    ]


def list_live_checks(release: str, bin_folder: Path) -> list[Check]:
    """The modules of tests/live that run on a release."""
    pytest = [*pytest_of(bin_folder), "-v", "--durations=5", "--durations-min=1"]
    return [
        Check(module.name, [*pytest, f"tests/live/{module.name}.py"], REPOSITORY)
        for module in LIVE
        if not module.only_on or release in module.only_on
    ]


def pytest_of(bin_folder: Path) -> list[str]:
    return [str(bin_folder / "python"), "-m", "pytest", "-p", "no:cacheprovider"]


def run_in_lanes(jobs: Sequence[Job]) -> list[str]:
    """Run them all, some at a time, the output of each when it has ended. Returns the titles of those that failed."""

    def run_apart(job: Job) -> str | None:
        with tempfile.TemporaryFile("w+") as output:
            failed = run_check(job, output)
            output.seek(0)
            say(f"what {job.check.name} ({job.release}) printed:\n{output.read()}")
        return failed

    with ThreadPoolExecutor(LANES) as lanes:
        return list(filter(None, lanes.map(run_apart, jobs)))


def run_check(job: Job, output: IO[str]) -> str | None:
    """Run it, and print there what it prints. Its title if it failed."""
    check = job.check
    title = f"{check.name} ({job.release})"
    say(f"{title}: {shlex.join(check.command)}")
    began = time.monotonic()
    done = subprocess.run(
        check.command, cwd=check.folder, env=job.variables, check=False, stdout=output, stderr=subprocess.STDOUT
    )
    verdict = "passed" if done.returncode == 0 else f"FAILED, exit status {done.returncode},"
    say(f"{title}: {verdict} in {time.monotonic() - began:.0f} s")
    return None if done.returncode == 0 else title


def prepare_release(release: str, elsewhere: Path, *, with_single: bool, engines: bool) -> list[Job]:
    """Make the release's environment. Returns what is to be run in it.

    Errors: NoInterpreter, NoLibrary when this machine cannot run the release; CalledProcessError.
    """
    say(f"environment of vLLM {release}")
    began = time.monotonic()
    folder = make_environment(RELEASES[release])
    say(f"environment of vLLM {release}: ready in {time.monotonic() - began:.0f} s")
    variables = run_variables(RELEASES[release], folder)
    single = list_single_checks(folder / "bin") if with_single else []
    live = list_live_checks(release, folder / "bin") if engines else []
    checks = [*single, *list_release_checks(release, folder / "bin", elsewhere), *live]
    return [Job(release, check, variables) for check in checks]


def say(text: str) -> None:
    # In one write: lanes print at the same time.
    print(f"== check: {text}\n", end="", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description="Run the project's checks on supported vLLM releases.")
    default = f"only this one, may be given again (default: {', '.join(CHECKED)})"
    parser.add_argument("--release", choices=list(RELEASES), metavar="RELEASE", action="append", help=default)
    parser.add_argument("--without-engines", action="store_true", help="leave out tests/live (default: run them)")
    args = parser.parse_args()
    began = time.monotonic()
    jobs: list[Job] = []
    checked: list[str] = []
    failed: list[str] = []
    left_out: list[str] = []
    with tempfile.TemporaryDirectory(prefix="vllm-overlay-check-") as elsewhere:
        for release in args.release or CHECKED:
            # One for each release: mypy keeps its cache where it runs.
            folder = Path(elsewhere, release)
            folder.mkdir(exist_ok=True)
            try:
                jobs += prepare_release(release, folder, with_single=not jobs, engines=not args.without_engines)
                checked.append(release)
            except (NoInterpreter, NoLibrary) as error:
                left_out.append(str(error))
            except subprocess.CalledProcessError as error:
                say(f"environment of vLLM {release}: FAILED: {error}")
                failed.append(f"environment ({release})")
        # All in one queue, so that no lane waits for the last check of a release.
        failed += run_in_lanes(jobs)
    for reason in left_out:
        say(f"LEFT OUT: {reason}")
    verdict = f"FAILED: {', '.join(failed)}" if failed else f"all passed on vLLM {', '.join(checked)}"
    say(f"{verdict if checked else 'FAILED: nothing was checked'}; {(time.monotonic() - began) / 60:.1f} min")
    return 0 if checked and not failed else 1


if __name__ == "__main__":
    sys.exit(main())
