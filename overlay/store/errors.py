"""What can go wrong in a store, and the one place where an operating system's error gets the path it is about."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vllm_overlay.errors import OverlayError


class StoreError(OverlayError):
    """A store that cannot be opened, read or written: one line with the path."""


class IncompleteRecordError(StoreError):
    """The hidden states of a record were asked for, and some of its positions have none."""


@contextmanager
def naming_path(action: str, path: Path) -> Iterator[None]:
    """Turn an OSError of the block into a StoreError that says what was done to which path, and why it failed."""
    try:
        yield
    except OSError as error:
        raise StoreError(f"cannot {action} {path}: {error.strerror or error}") from error
