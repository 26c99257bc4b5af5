"""Which rank captures which columns."""

from __future__ import annotations

import pytest

from vllm_overlay.capture.ranks import Place, Share, find_share

STAGES = ((0, 2), (2, 3), (3, 6))


def test_the_first_tensor_parallel_rank_captures_all() -> None:
    """CASES 12: of four."""
    shares = [find_share((6, 0), Place(rank, 0, ((0, 6),))) for rank in range(4)]
    assert shares == [Share((0, 1), 0, 1), None, None, None]


@pytest.mark.parametrize(
    ("layer_ids", "shares"),
    [
        # Id 0 enters layer 0; id 2 leaves layer 1, the first stage's last; id 3 is what the middle stage returns.
        ((6, 0, 3, 2), [Share((1, 3), 0, 3), Share((2,), 1, 3), Share((0,), 2, 3)]),
        ((4, 5), [None, None, Share((0, 1), 0, 1)]),
        ((1, 6), [Share((0,), 0, 2), None, Share((1,), 1, 2)]),
    ],
)
def test_a_stage_captures_the_layers_that_it_computes(layer_ids: tuple[int, ...], shares: list[Share | None]) -> None:
    assert [find_share(layer_ids, Place(0, stage, STAGES)) for stage in range(3)] == shares
    assert [find_share(layer_ids, Place(1, stage, STAGES)) for stage in range(3)] == [None] * 3
