"""Checksums of rows and records.

The hash of a row is multilinear: the sum of its 32-bit little-endian words (the last one padded with zeros), each times
a 64-bit weight of its place, modulo 2**64. Whatever changes in a row, the sum stays the same for at most one choice of
weights in 2**32 (Lemire and Kaser, "Strongly universal string hashing is fast", 2014). It is one call of numpy for all
rows of a step, which lets other threads run meanwhile; XXH3 of 32 KiB holds the interpreter's lock, row by row.

The checksum of a record is XXH3-64 (https://github.com/Cyan4973/xxHash) over its token ids, as they are stored, and the
hashes of its rows in position order, little-endian. In stores of schema version 1 it goes over the rows themselves.
Positions without a row add nothing.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterator

import numpy as np
import xxhash
from numpy.typing import NDArray

from vllm_overlay.store.extents import HOLE, Extents

CHUNK_BYTES = 16 << 20
WORD_BYTES = 4

# Fills the memory with the rows from a row number on, from disk; it may raise.
ReadRows = Callable[[int, memoryview], None]
Hashes = NDArray[np.uint64]


def hash_rows(data: memoryview, row_bytes: int) -> Hashes:
    """The hashes of whole rows, uint64 `[rows]`."""
    rows: NDArray[np.uint8] = np.frombuffer(data, dtype=np.uint8).reshape(-1, row_bytes)
    if row_bytes % WORD_BYTES:
        rows = np.pad(rows, ((0, 0), (0, -row_bytes % WORD_BYTES)))
    hashes: Hashes = np.einsum("rw,w->r", rows.view("<u4"), _weights(rows.shape[1] // WORD_BYTES))
    return hashes


def split_hashing(data: memoryview, row_bytes: int) -> list[Callable[[], Hashes]]:
    """Calls that hash whole rows, a limited number each, in their order; the memory stays as it is until they ended."""
    size = max(1, CHUNK_BYTES // row_bytes) * row_bytes
    return [functools.partial(hash_rows, data[at : at + size], row_bytes) for at in range(0, len(data), size)]


@functools.lru_cache(maxsize=4)
def _weights(count: int) -> Hashes:
    """The weights of all stores, uint64 `[count]`: odd, so that a single changed word always shows."""
    drawn = hashlib.shake_128(b"vllm-overlay row hash").digest(8 * count)
    weights: Hashes = np.frombuffer(drawn, dtype="<u8").astype(np.uint64) | np.uint64(1)
    return weights


def hash_extents(extents: Extents, row_bytes: int, read: ReadRows) -> Hashes:
    """The hashes of the rows of a record in position order, read from disk; holes add none."""
    hashes = [hash_rows(chunk, row_bytes) for chunk in _read_chunks(extents, row_bytes, read)]
    return np.concatenate([np.empty(0, dtype=np.uint64), *hashes])


def checksum_hashes(token_ids: bytes, hashes: Hashes) -> bytes:
    """The 8 bytes of a record's checksum, from the hashes of its rows."""
    digest = xxhash.xxh3_64(token_ids)
    digest.update(hashes.astype("<u8").tobytes())
    return bytes(digest.digest())


def _checksum_rows(token_ids: bytes, extents: Extents, row_bytes: int, read: ReadRows) -> bytes:
    digest = xxhash.xxh3_64(token_ids)
    for chunk in _read_chunks(extents, row_bytes, read):
        digest.update(chunk)
    return bytes(digest.digest())


def _checksum_hashes_of_rows(token_ids: bytes, extents: Extents, row_bytes: int, read: ReadRows) -> bytes:
    return checksum_hashes(token_ids, hash_extents(extents, row_bytes, read))


# By the version of the store's schema: the 8 bytes of a record's checksum from what is on disk.
COMPUTE_CHECKSUM = {1: _checksum_rows, 2: _checksum_hashes_of_rows, 3: _checksum_hashes_of_rows}


def _read_chunks(extents: Extents, row_bytes: int, read: ReadRows) -> Iterator[memoryview]:
    """Whole rows in position order, a limited number at a time and all in the same memory."""
    longest = int(extents[:, 1].max())
    rows_per_chunk = min(longest, max(1, CHUNK_BYTES // row_bytes))
    buffer = memoryview(bytearray(rows_per_chunk * row_bytes))
    for start, count in extents.tolist():
        if start == HOLE:
            continue
        for first in range(start, start + count, rows_per_chunk):
            chunk = buffer[: min(rows_per_chunk, start + count - first) * row_bytes]
            read(first, chunk)
            yield chunk
