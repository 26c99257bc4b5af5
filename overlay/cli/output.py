"""Where results go: standard output for the result alone, and folders of this machine."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from vllm_overlay.urls import is_url


def local_folder(text: str) -> Path:
    """The type of an argument that names a folder to write: to pathlib, a URL is one in the current folder."""
    if is_url(text):
        raise argparse.ArgumentTypeError(f"{text} is remote, and read only: name a folder of this machine")
    return Path(text)


@contextmanager
def keep_stdout_for_result() -> Iterator[TextIO]:
    """The real standard output; until the end, whatever else is written to it goes to standard error.

    vLLM logs to standard output and so do libraries in its processes (Gloo, from C++), which inherit the descriptor:
    a script that reads our JSON must not find their lines in it.
    """
    sys.stdout.flush()
    result = os.dup(1)
    os.dup2(2, 1)
    try:
        with os.fdopen(result, "w", encoding="utf-8", closefd=False) as stream:
            yield stream
    finally:
        sys.stdout.flush()
        os.dup2(result, 1)
        os.close(result)
