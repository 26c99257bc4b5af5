"""Every check of the project: style, types, import walls, and the tests, on each supported vLLM release.

    sh tools/check.sh                        # all of it; what .ci/run does
    sh tools/check.sh --release 0.16.0       # on one release
    sh tools/check.sh --without-engines      # all but the live tests

Types, walls and tests look at what the built wheel installs, not at the working tree. A check that fails does not stop
the others; the last line says which failed.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from environments import RELEASES, REPOSITORY, NoInterpreter, make_environment

PYPROJECT = str(REPOSITORY / "pyproject.toml")
WITHOUT_ENGINES = ("tests/contract", "tests/unit", "tests/patches", "tests/eagle3")
WITH_ENGINES = ("tests/live",)


@dataclass(frozen=True)
class Check:
    """A command that must exit with 0, run in `folder`."""

    name: str
    command: Sequence[str]
    folder: Path


def list_style_checks(bin_folder: Path) -> list[Check]:
    """What does not depend on the vLLM release."""
    ruff = str(bin_folder / "ruff")
    tools = [str(file) for file in sorted((REPOSITORY / "tools").glob("*.py"))]
    return [
        Check("ruff", [ruff, "check", "."], REPOSITORY),
        Check("format", [ruff, "format", "--check", "."], REPOSITORY),
        Check("types of tools", [str(bin_folder / "mypy"), "--config-file", PYPROJECT, *tools], REPOSITORY),
    ]


def list_release_checks(bin_folder: Path, elsewhere: Path, *, engines: bool) -> list[Check]:
    """What is run on every release. `elsewhere` is a folder in which the working tree cannot be imported."""
    pytest = [str(bin_folder / "python"), "-m", "pytest", "-p", "no:cacheprovider"]
    checks = [
        Check("types", [str(bin_folder / "mypy"), "--config-file", PYPROJECT, "-p", "vllm_overlay"], elsewhere),
        Check("walls", [str(bin_folder / "lint-imports"), "--no-cache", "--config", PYPROJECT], elsewhere),
        Check("tests", [*pytest, *WITHOUT_ENGINES], REPOSITORY),
    ]
    if engines:
        checks.append(Check("live tests", [*pytest, "-v", "--durations=10", *WITH_ENGINES], REPOSITORY))
    return checks


def test_environment(bin_folder: Path) -> dict[str, str]:
    """This process's variables, with none of vLLM's or ours, and the release's programs first on the PATH."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("VLLM_", "PYTHON"))}
    return kept | {
        "PATH": f"{bin_folder}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
        "OMP_NUM_THREADS": "2",
        # Threads that wait for each other by spinning are ten times slower when another process wants the core.
        "OMP_WAIT_POLICY": "PASSIVE",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }


def run_checks(release: str, checks: Sequence[Check], environment: dict[str, str]) -> list[str]:
    """Run them all. Returns those that failed."""
    failed = []
    for check in checks:
        title = f"{check.name} ({release})"
        say(f"{title}: {shlex.join(check.command)}")
        began = time.monotonic()
        status = subprocess.run(check.command, cwd=check.folder, env=environment, check=False).returncode
        if status != 0:
            failed.append(title)
        verdict = "passed" if status == 0 else f"FAILED, exit status {status},"
        say(f"{title}: {verdict} in {time.monotonic() - began:.0f} s")
    return failed


def check_release(release: str, *, with_style: bool, engines: bool) -> list[str]:
    """Make the release's environment and run the checks in it. Returns those that failed."""
    say(f"environment of vLLM {release}")
    began = time.monotonic()
    try:
        bin_folder = make_environment(RELEASES[release]) / "bin"
    except subprocess.CalledProcessError as error:
        say(f"environment of vLLM {release}: FAILED: {error}")
        return [f"environment ({release})"]
    say(f"environment of vLLM {release}: ready in {time.monotonic() - began:.0f} s")
    with tempfile.TemporaryDirectory(prefix="vllm-overlay-check-") as elsewhere:
        checks = list_release_checks(bin_folder, Path(elsewhere), engines=engines)
        if with_style:
            checks = [*list_style_checks(bin_folder), *checks]
        return run_checks(release, checks, test_environment(bin_folder))


def say(text: str) -> None:
    print(f"== check: {text}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description="Run the project's checks on each supported vLLM release.")
    parser.add_argument("--release", choices=list(RELEASES), action="append", help="only this one (default: all)")
    parser.add_argument("--without-engines", action="store_true", help="leave out tests/live (default: run them)")
    args = parser.parse_args()
    began = time.monotonic()
    checked: list[str] = []
    failed: list[str] = []
    left_out: list[str] = []
    for release in args.release or list(RELEASES):
        try:
            failed += check_release(release, with_style=not checked, engines=not args.without_engines)
            checked.append(release)
        except NoInterpreter as error:
            left_out.append(str(error))
    for reason in left_out:
        say(f"LEFT OUT: {reason}")
    verdict = f"FAILED: {', '.join(failed)}" if failed else f"all passed on vLLM {', '.join(checked)}"
    say(f"{verdict if checked else 'FAILED: nothing was checked'}; {(time.monotonic() - began) / 60:.1f} min")
    return 0 if checked and not failed else 1


if __name__ == "__main__":
    sys.exit(main())
