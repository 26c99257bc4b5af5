"""Extents: runs of consecutive rows, int64 `[extents, 2]` of (start, count). Start -1 is a hole: no rows there."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

HOLE = -1
EXTENT_BYTES = 16  # packed

Extents = NDArray[np.int64]


def find_extents(rows: NDArray[np.int64]) -> Extents:
    """The extents of a record whose positions have the row numbers `rows` `[T]`; -1 where a position has none."""
    return find_extents_of_each(rows, [0])[0]


def find_extents_of_each(rows: NDArray[np.int64], starts: Sequence[int]) -> list[Extents]:
    """The extents of records whose rows lie one after the other in `rows` `[T]`, each from one of `starts` on.

    No record is empty. It takes hardly longer for hundreds of records than for one.
    """
    # The same number for all positions of a run, and for holes one that no row gives.
    run = np.where(rows < 0, HOLE - len(rows), rows - np.arange(len(rows)))
    begins = np.concatenate(([True], run[1:] != run[:-1]))
    begins[starts] = True
    first = np.flatnonzero(begins)
    extents = np.stack((rows[first], np.diff(first, append=len(rows))), axis=1)  # [extents, 2]
    return np.split(extents, np.searchsorted(first, starts[1:]))


def find_holes(extents: Extents) -> list[tuple[int, int]]:
    """The positions without a row, as (first, last) pairs."""
    holes = extents[:, 0] == HOLE
    ends = np.cumsum(extents[:, 1])[holes]
    return list(zip((ends - extents[holes, 1]).tolist(), (ends - 1).tolist(), strict=True))


def number_rows(extents: Extents) -> NDArray[np.int64]:
    """The number of each row of extents without holes, in their order: int64 `[rows]`."""
    starts, counts = extents[:, 0], extents[:, 1]
    before = np.cumsum(counts) - counts
    return np.repeat(starts - before, counts) + np.arange(counts.sum())


def merge_extents(extents: Iterable[Extents]) -> Extents:
    """The rows that occur in any of the extents, each once: disjoint extents in ascending order, without holes."""
    every: Extents = np.concatenate([np.empty((0, 2), dtype=np.int64), *extents])
    every = every[every[:, 0] != HOLE]
    if not len(every):
        return np.empty((0, 2), dtype=np.int64)
    every = every[np.argsort(every[:, 0], kind="stable")]
    starts, ends = every[:, 0], np.maximum.accumulate(every.sum(axis=1))
    fresh = np.concatenate(([True], starts[1:] > ends[:-1]))
    first = np.flatnonzero(fresh)
    last = np.append(first[1:], len(every)) - 1
    return np.stack((starts[first], ends[last] - starts[first]), axis=1)


def pack_extents(extents: Extents) -> bytes:
    return extents.astype("<i8").tobytes()


def unpack_extents(blob: bytes) -> Extents:
    return np.frombuffer(blob, dtype="<i8").astype(np.int64).reshape(-1, 2)
