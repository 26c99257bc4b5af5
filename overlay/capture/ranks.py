"""Which rank of an engine captures which layers: every column has one writer.

Tensor-parallel ranks hold the same residual stream, so the first of each pipeline stage captures, and a stage captures
the layers that it computes. Data-parallel replicas are engines of their own: each captures its requests whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Place:
    """Where a worker stands in its engine. `stage_layers` has each pipeline stage's layers, [first, end) from 0."""

    tensor_rank: int
    stage: int
    stage_layers: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Share:
    """What one rank captures: these columns of the layers asked for, as part `part` of `num_parts` of each record."""

    columns: tuple[int, ...]
    part: int
    num_parts: int


def find_share(layer_ids: Sequence[int], place: Place) -> Share | None:
    """The columns that the worker in this place captures; None when its rows are another rank's to capture."""
    if place.tensor_rank != 0:
        return None
    by_stage = [
        tuple(column for column, layer_id in enumerate(layer_ids) if _is_computed_by(layer_id, layers))
        for layers in place.stage_layers
    ]
    if not by_stage[place.stage]:
        return None
    part = sum(bool(columns) for columns in by_stage[: place.stage])
    return Share(by_stage[place.stage], part, sum(bool(columns) for columns in by_stage))


def _is_computed_by(layer_id: int, layers: tuple[int, int]) -> bool:
    """Id 0 is what the first layer receives, id k what layer k - 1 returns."""
    first, end = layers
    return first <= max(0, layer_id - 1) < end
