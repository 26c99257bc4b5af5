"""The hashes of a log's rows, made and kept in memory at the append so that a commit reads no row back."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from vllm_overlay.store.checksum import Hashes, ReadRows, hash_extents
from vllm_overlay.store.extents import find_extents

CHUNK_ROWS = 65_536

# 64 MiB. A server writes for days; what is older and was in no record for long is hashed from disk when it is needed.
KEPT_CHUNKS = 128

PIECE = 16_384  # rows that are looked up at once


class RowHashes:
    """The hashes by row number, in chunks, of which those used last are kept. Not safe to use from several threads."""

    def __init__(self, row_bytes: int) -> None:
        self._row_bytes = row_bytes
        self._chunks: OrderedDict[int, Hashes] = OrderedDict()

    def put(self, first: int, hashes: Hashes) -> None:
        """Rows `first` .. have these hashes; what was there before is superseded."""
        while len(hashes):
            number, offset = divmod(first, CHUNK_ROWS)
            count = min(CHUNK_ROWS - offset, len(hashes))
            if number not in self._chunks:
                self._chunks[number] = np.zeros(CHUNK_ROWS, dtype=np.uint64)
            self._chunks[number][offset : offset + count] = hashes[:count]
            self._chunks.move_to_end(number)
            first, hashes = first + count, hashes[count:]
        while len(self._chunks) > KEPT_CHUNKS:
            self._chunks.popitem(last=False)

    def find(self, rows: NDArray[np.int64], read: ReadRows) -> Hashes:
        """The hashes of these rows, uint64 `[rows]`; `read` gives rows from disk whose hashes are kept no more."""
        hashes = np.empty(len(rows), dtype=np.uint64)
        for number, here in group_by_chunk(rows, CHUNK_ROWS):
            if number in self._chunks:
                hashes[here] = self._chunks[number][rows[here] % CHUNK_ROWS]
                self._chunks.move_to_end(number)
            else:
                hashes[here] = hash_extents(find_extents(rows[here]), self._row_bytes, read)
        return hashes


def group_by_chunk(rows: NDArray[np.int64], size: int) -> Iterator[tuple[int, slice | NDArray[np.int64]]]:
    """The number of a chunk of `size` rows, and which of these rows are in it; a chunk may come more than once.

    A missing row (negative) is in none. Neighbours are mostly in one chunk or two, so it goes piece by piece: all rows
    of hundreds of records, held against every chunk that one of them is in, would take many times as long.
    """
    for start in range(0, len(rows), PIECE):
        piece = rows[start : start + PIECE]
        first, last = int(piece.min()) // size, int(piece.max()) // size
        if first == last:
            if first >= 0:
                yield first, slice(start, start + len(piece))
            continue
        chunk_of_row = piece // size
        numbers = np.flatnonzero(np.bincount(chunk_of_row - first)) + first
        for number in numbers[numbers >= 0].tolist():
            yield number, start + np.flatnonzero(chunk_of_row == number)
