"""Tokens by row number, in chunks that are dropped when nothing refers to them."""

from __future__ import annotations

import numpy as np
import pytest

from vllm_overlay.capture import row_tokens
from vllm_overlay.capture.row_tokens import RowTokens
from vllm_overlay.store import row_hashes


@pytest.fixture
def tokens(monkeypatch: pytest.MonkeyPatch) -> RowTokens:
    """Rows 0 .. 10 of the tokens 100 .. 110, in chunks of 4."""
    monkeypatch.setattr(row_tokens, "CHUNK_ROWS", 4)
    tokens = RowTokens()
    tokens.put(0, np.arange(100, 103, dtype=np.int32))
    tokens.put(3, np.arange(103, 111, dtype=np.int32))
    return tokens


def test_tokens_are_found_in_any_order_and_a_missing_row_has_none(tokens: RowTokens) -> None:
    found = tokens.find(np.array([10, -1, 3, 4, 0, 0]))
    assert found.dtype == np.int64
    assert found.tolist() == [110, -1, 103, 104, 100, 100]


@pytest.mark.parametrize("piece", [1, 2, 3, 16])
def test_tokens_are_found_piece_by_piece(tokens: RowTokens, piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_hashes, "PIECE", piece)
    rows = [4, 5, 6, -1, -1, -1, 10, 0, 9, 3, 4, -1]
    assert tokens.find(np.array(rows)).tolist() == [row if row < 0 else 100 + row for row in rows]
    assert tokens.find(np.array([], dtype=np.int64)).tolist() == []


def test_dropped_chunks_are_gone_and_the_others_stay(tokens: RowTokens) -> None:
    assert tokens.num_chunks == 3
    tokens.keep({0, 2, 9})
    assert tokens.num_chunks == 2
    assert tokens.find(np.array([0, 8])).tolist() == [100, 108]
    with pytest.raises(KeyError):
        tokens.find(np.array([4]))


@pytest.mark.parametrize(("live", "left"), [({0}, [100, 104, 108]), ({1}, [104, 108]), ({2}, [108])])
def test_rows_that_came_since_are_kept(tokens: RowTokens, live: set[int], left: list[int]) -> None:
    """What is live was found out before the last rows were put: they are written first of all that was posted."""
    tokens.keep(live)
    assert tokens.num_chunks == len(left)
    assert tokens.find(np.array([token - 100 for token in left])).tolist() == left
