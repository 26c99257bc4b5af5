"""The token of every row that a request may still become a record of, by row number."""

from __future__ import annotations

from collections.abc import Set

import numpy as np
from numpy.typing import NDArray

from vllm_overlay.store.row_hashes import group_by_chunk

CHUNK_ROWS = 65_536


class RowTokens:
    """Tokens in chunks of CHUNK_ROWS rows, 256 KiB each. Chunks that no live request can need are dropped by `keep`."""

    def __init__(self) -> None:
        self._chunks: dict[int, NDArray[np.int32]] = {}

    def put(self, first: int, tokens: NDArray[np.int32]) -> None:
        """Rows `first` .. were computed from these tokens."""
        while len(tokens):
            number, offset = divmod(first, CHUNK_ROWS)
            count = min(CHUNK_ROWS - offset, len(tokens))
            if number not in self._chunks:
                self._chunks[number] = np.full(CHUNK_ROWS, -1, dtype=np.int32)
            self._chunks[number][offset : offset + count] = tokens[:count]
            first, tokens = first + count, tokens[count:]

    def find(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """The tokens of rows `[n]`, -1 where a row is missing (negative). Errors: KeyError if a chunk was dropped."""
        tokens = np.full(len(rows), -1, dtype=np.int64)
        for number, here in group_by_chunk(rows, CHUNK_ROWS):
            tokens[here] = self._chunks[number][rows[here] % CHUNK_ROWS]
        return tokens

    def keep(self, numbers: Set[int]) -> None:
        """Drop the chunks with other numbers, but for those behind the last of them: their rows have come since."""
        last = max(numbers)
        self._chunks = {number: chunk for number, chunk in self._chunks.items() if number in numbers or number > last}

    @property
    def num_chunks(self) -> int:
        return len(self._chunks)
