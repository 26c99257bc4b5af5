"""A folder that appears whole or not at all."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from vllm_overlay.store.errors import StoreError, naming_path
from vllm_overlay.store.remote import StorePath


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A folder to fill, beside `path`, which it becomes when the block ends well; else it is removed.

    A link to a folder stays one: the folder it leads to is made. Raises StoreError if `path` is there and not an empty
    folder, or one that cannot be replaced, or the folder cannot be made.
    """
    with naming_path("write to", path):
        target = path.resolve()
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise StoreError(f"{path} is there and not an empty folder: name a new one")
        if target == Path.cwd() or target.is_mount():
            kind = "the current folder" if target == Path.cwd() else "a mount point"
            raise StoreError(f"{path} is {kind}, in whose place no other can be put: name a folder in it")
        target.parent.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        yield unfinished
        with naming_path("write to", path):
            unfinished.chmod(0o755)
            unfinished.replace(target)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def refuse_nested(path: Path, sources: Iterable[StorePath]) -> None:
    """Raises StoreError if `path` would lie within one of the folders: a store in a store is read as a part of it."""
    for source in sources:
        if isinstance(source, Path) and source.resolve() in path.resolve().parents:
            raise StoreError(f"{path} would lie within {source}, which it is made from: name a folder outside of it")
