"""Packages other than vLLM: whether they are installed in the versions that a patch, or vLLM itself, asks for."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import metadata

from packaging.requirements import Requirement


def find_lack(requirement: str) -> str | None:
    """Why the installed packages do not meet a requirement such as `speculators==0.3.*`; None if they do.

    A requirement whose marker is not true here, such as `; sys_platform == "win32"`, is met.
    """
    wanted = Requirement(requirement)
    if wanted.marker and not wanted.marker.evaluate({"extra": ""}):
        return None
    try:
        installed = metadata.version(wanted.name)
    except metadata.PackageNotFoundError:
        return f"{wanted.name} is not installed"
    if wanted.specifier.contains(installed, prereleases=True):
        return None
    return f"{wanted.name} {installed} is outside {wanted.specifier}"


def find_requirement(requirements: Iterable[str], name: str) -> str | None:
    """What a distribution's requirements ask of a package on this machine, such as `torch==2.10.0`; None if nothing.

    Local parts are left out: `torch==2.10.0+cpu` is met by the torch of any index.
    """
    for wanted in map(Requirement, requirements):
        if wanted.name == name and (not wanted.marker or wanted.marker.evaluate({"extra": ""})):
            versions = (str(one).partition("+")[0] for one in wanted.specifier)
            return f"{name}{','.join(sorted(versions))}"
    return None
