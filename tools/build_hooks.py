"""The build backend: setuptools', and one file more at the top of site-packages.

setuptools has no setting for a file there, and none at all for editable installs, so the wheels that it makes (PEP 517)
and the editable ones (PEP 660) get `vllm_overlay.pth` afterwards; installers then remove it with the rest. Editable
installs are strict unless `--config-settings editable_mode=...` says otherwise: of setuptools' modes it is the only one
in which mypy and import-linter see folders that are imported under another name. A new file needs a new install.

The line tests the variable before it imports anything of ours: with `VLLM_OVERLAY` unset, an interpreter start pays for
one dictionary look-up. An exception in a `.pth` line is printed and the program goes on, so `activate` only registers
import hooks and leaves every refusal to them.
"""

from __future__ import annotations

import base64
import hashlib
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from setuptools import build_meta

STARTUP_FILE = "vllm_overlay.pth"
STARTUP_LINE = (
    "import os; os.environ.get('VLLM_OVERLAY', '0') in ('', '0') or "
    "__import__('vllm_overlay.activation', fromlist=['activate']).activate()\n"
)

build_sdist = build_meta.build_sdist
get_requires_for_build_editable = build_meta.get_requires_for_build_editable
get_requires_for_build_sdist = build_meta.get_requires_for_build_sdist
get_requires_for_build_wheel = build_meta.get_requires_for_build_wheel
prepare_metadata_for_build_editable = build_meta.prepare_metadata_for_build_editable
prepare_metadata_for_build_wheel = build_meta.prepare_metadata_for_build_wheel


def build_wheel(
    wheel_directory: str, config_settings: Mapping[str, Any] | None = None, metadata_directory: str | None = None
) -> str:
    """setuptools' wheel with the start-up file. Returns its file name in `wheel_directory`."""
    name: str = build_meta.build_wheel(wheel_directory, dict(config_settings or {}), metadata_directory)
    add_startup_file(Path(wheel_directory, name))
    return name


def build_editable(
    wheel_directory: str, config_settings: Mapping[str, Any] | None = None, metadata_directory: str | None = None
) -> str:
    """setuptools' editable wheel, strict, with the start-up file. Returns its file name in `wheel_directory`."""
    settings = {"editable_mode": "strict"} | dict(config_settings or {})
    name: str = build_meta.build_editable(wheel_directory, settings, metadata_directory)
    add_startup_file(Path(wheel_directory, name))
    return name


def add_startup_file(wheel: Path) -> None:
    """Write the wheel again with the start-up file in it and in its RECORD."""
    content = STARTUP_LINE.encode()
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
    unfinished = wheel.with_name(f"{wheel.name}.tmp")
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(unfinished, "w", zipfile.ZIP_DEFLATED) as new:
        for member in old.infolist():
            data = old.read(member)
            if member.filename.endswith(".dist-info/RECORD"):
                startup_member = zipfile.ZipInfo(STARTUP_FILE, member.date_time)
                startup_member.external_attr = member.external_attr
                startup_member.compress_type = zipfile.ZIP_DEFLATED
                new.writestr(startup_member, content)
                data = f"{STARTUP_FILE},sha256={digest},{len(content)}\n".encode() + data
            new.writestr(member, data)
    unfinished.replace(wheel)
