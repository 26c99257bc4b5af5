"""A folder that appears whole or not at all."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vllm_overlay.store.errors import StoreError, naming_path


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A folder to fill, beside `path`, which it becomes when the block ends well; else it is removed.

    Raises StoreError if `path` is there and not an empty folder, or the folder cannot be made.
    """
    with naming_path("write to", path):
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise StoreError(f"{path} is there and not an empty folder: name a new one")
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
    try:
        yield unfinished
        with naming_path("write to", path):
            unfinished.chmod(0o755)
            unfinished.replace(path)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
