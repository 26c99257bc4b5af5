"""The checksum of a record: XXH3-64 over its token ids, then its rows in position order, all as the bytes that are
stored.

https://github.com/Cyan4973/xxHash; positions without a row add nothing.
"""

from __future__ import annotations

from collections.abc import Callable

import xxhash

from vllm_overlay.store.extents import HOLE, Extents

CHUNK_BYTES = 16 << 20


def compute_checksum(
    token_ids: bytes, extents: Extents, row_bytes: int, read: Callable[[int, memoryview], None]
) -> bytes:
    """The 8 bytes of the digest. `read(start, out)` fills `out` with the rows from `start` on; it may raise."""
    digest = xxhash.xxh3_64(token_ids)
    longest = int(extents[:, 1].max())
    rows_per_chunk = min(longest, max(1, CHUNK_BYTES // row_bytes))
    buffer = memoryview(bytearray(rows_per_chunk * row_bytes))
    for start, count in extents.tolist():
        if start == HOLE:
            continue
        for first in range(start, start + count, rows_per_chunk):
            chunk = buffer[: min(rows_per_chunk, start + count - first) * row_bytes]
            read(first, chunk)
            digest.update(chunk)
    return bytes(digest.digest())
