"""A folder that the processes of one run of vLLM share, for what vLLM's own ways between them do not carry.

The process that starts the others makes it; its name is inherited through the environment.
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from pathlib import Path

# Not `VLLM_OVERLAY_*`: no setting of the user's, and vLLM warns of `VLLM_` variables that it does not know.
FOLDER_VARIABLE = "_VLLM_OVERLAY_FOLDER"


def share_folder() -> None:
    """Have the processes that this one starts from now on, and theirs, share a folder with this one."""
    if FOLDER_VARIABLE in os.environ:
        return
    folder = tempfile.mkdtemp(prefix="vllm-overlay-")
    os.environ[FOLDER_VARIABLE] = folder
    atexit.register(_remove_folder, folder, os.getpid())


def find_folder() -> Path | None:
    """The folder, if there is one and its owner still lives."""
    name = os.environ.get(FOLDER_VARIABLE)
    return Path(name) if name and Path(name).is_dir() else None


def _remove_folder(folder: str, owner: int) -> None:
    # A forked child inherits this.
    if os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)
