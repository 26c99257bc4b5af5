"""Build hooks: the start-up line in every wheel, and editable installs that type checkers can follow.

setuptools has no setting for a file at the top of site-packages, so `build_py` writes it. The line tests the variable
before it imports anything of ours: with `VLLM_OVERLAY` unset an interpreter start pays for one dictionary look-up.
An exception in a `.pth` line is printed and the program goes on, so `activate` only registers import hooks and leaves
every refusal to them.
"""

from __future__ import annotations

from pathlib import Path

from setuptools.command.build_py import build_py
from setuptools.command.editable_wheel import editable_wheel

STARTUP_FILE = "vllm_overlay.pth"
STARTUP_LINE = (
    "import os; os.environ.get('VLLM_OVERLAY', '0') in ('', '0') or "
    "__import__('vllm_overlay.activation', fromlist=['activate']).activate()\n"
)


class BuildWithStartupLine(build_py):
    """`build_py` that also writes the start-up line beside the packages."""

    def _startup_file(self) -> Path:
        return Path(self.build_lib) / STARTUP_FILE

    def run(self) -> None:
        super().run()
        target = self._startup_file()
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(STARTUP_LINE, encoding="utf-8")

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        return [*super().get_outputs(include_bytecode), str(self._startup_file())]

    def get_output_mapping(self) -> dict[str, str]:
        # A strict editable install links files by this mapping; the start-up file has no source and is copied.
        return super().get_output_mapping()


class StrictEditable(editable_wheel):
    """Editable installs in strict mode: the only one in which mypy and import-linter see the mapped folders."""

    def finalize_options(self) -> None:
        self.mode = self.mode or "strict"
        super().finalize_options()
