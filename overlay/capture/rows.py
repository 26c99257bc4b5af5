"""Which row of a step belongs to which request and position, and where every row of a request went.

Pure accounting: numpy only, no torch, no vLLM. A row has a number, counted over the whole log in the order in which
rows are written. A request is an array of row numbers by position; the last write of a position wins, because
pre-empted requests recompute and rejected speculative tokens are overwritten.

A prefix that vLLM finds in its cache is not computed again, so its rows do not pass by. The request's block table
names the physical KV blocks that hold it, and `slot_rows` says which row filled each slot of each block.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Rows = NDArray[np.int64]
MISSING = -1


class RowError(RuntimeError):
    """The step does not add up: vLLM said one thing and did another."""


@dataclass(frozen=True)
class NewRequest:
    """A request that a step schedules for the first time, or again after it was pre-empted (`resumed`)."""

    key: str
    num_prompt_tokens: int
    num_computed_tokens: int
    blocks: tuple[int, ...]
    captured: bool
    resumed: bool = False


@dataclass(frozen=True)
class Step:
    """What one step computes. `order` is the order of the requests' rows in the buffer."""

    new: tuple[NewRequest, ...]
    starts: Mapping[str, int]  # first position computed, of requests that are not new
    more_blocks: Mapping[str, tuple[int, ...]]
    scheduled: Mapping[str, int]  # number of positions computed
    order: tuple[str, ...]
    copies: Sequence[tuple[int, int]] = ()


@dataclass(frozen=True)
class Span:
    """Positions `start .. start+count` of a request, in rows `offset .. offset+count` of what is written."""

    key: str
    start: int
    count: int
    offset: int


@dataclass(frozen=True)
class Plan:
    """Of a step's rows, the ones to write: their indices in the buffer, the first one's number, whose they are."""

    indices: NDArray[np.int64] | None  # None: the first `count` rows of the buffer, without a gap
    count: int
    first_row: int
    spans: tuple[Span, ...]


@dataclass
class _Request:
    captured: bool
    num_prompt_tokens: int
    blocks: list[int]
    rows: Rows = field(default_factory=lambda: np.full(256, MISSING, dtype=np.int64))

    def reserve(self, length: int) -> None:
        if length <= len(self.rows):
            return
        grown = np.full(max(length, 2 * len(self.rows)), MISSING, dtype=np.int64)
        grown[: len(self.rows)] = self.rows
        self.rows = grown


class RowBook:
    """The accounting of one worker.

    `num_slots` is KV blocks times block size of the full-attention group; 0 when the model has none, and then a
    cached prefix cannot be found again and makes an incomplete record.
    """

    def __init__(self, *, block_size: int, num_slots: int, prompt_only: bool = False) -> None:
        self._block_size = block_size
        self._slot_rows: Rows = np.full(num_slots, MISSING, dtype=np.int64)
        self._prompt_only = prompt_only
        self._requests: dict[str, _Request] = {}
        self._next_row = 0

    def __contains__(self, key: str) -> bool:
        return key in self._requests

    @property
    def num_live(self) -> int:
        return len(self._requests)

    def plan(self, step: Step) -> Plan:
        """Account for a step. Errors: RowError when the step names a request that was never new."""
        self._copy_blocks(step.copies)
        starts = dict(step.starts)
        for new in step.new:
            self._begin(new)
            starts[new.key] = new.num_computed_tokens
        for key, blocks in step.more_blocks.items():
            self._find(key).blocks.extend(blocks)
        plan = self._assign(step, starts)
        # After the assignment: a request may hit blocks that another one fills in this very step.
        for new in step.new:
            self._fill_from_cache(new)
        return plan

    def find_rows(self, key: str, num_rows: int) -> Rows:
        """The row numbers of positions 0 .. num_rows, MISSING where none is known."""
        request = self._find(key)
        if self._prompt_only:
            num_rows = min(num_rows, request.num_prompt_tokens)
        request.reserve(num_rows)
        return request.rows[:num_rows].copy()

    def count_leading_rows(self, key: str) -> int:
        """How many positions from the first on have a row."""
        missing = np.flatnonzero(self._find(key).rows == MISSING)
        return int(missing[0]) if len(missing) else len(self._find(key).rows)

    def forget(self, key: str) -> None:
        """The request has ended."""
        del self._requests[key]

    def is_captured(self, key: str) -> bool:
        return self._find(key).captured

    def _find(self, key: str) -> _Request:
        try:
            return self._requests[key]
        except KeyError:
            raise RowError(f"a step computes request {key!r}, which no step announced as new") from None

    def _begin(self, new: NewRequest) -> None:
        known = self._requests.get(new.key)
        if known is not None:
            known.blocks = list(new.blocks)
            return
        if new.resumed:
            raise RowError(f"request {new.key!r} is resumed, and no step announced it as new")
        self._requests[new.key] = _Request(new.captured, new.num_prompt_tokens, list(new.blocks))

    def _assign(self, step: Step, starts: Mapping[str, int]) -> Plan:
        spans: list[Span] = []
        pieces: list[NDArray[np.int64]] = []
        first_row, cursor, written = self._next_row, 0, 0
        for key in step.order:
            request, start, count = self._find(key), starts[key], step.scheduled[key]
            kept = self._count_kept(request, start, count)
            rows = np.full(count, MISSING, dtype=np.int64)
            if kept:
                rows[:kept] = np.arange(first_row + written, first_row + written + kept)
                request.reserve(start + kept)
                request.rows[start : start + kept] = rows[:kept]
                spans.append(Span(key, start, kept, written))
                pieces.append(np.arange(cursor, cursor + kept))
                written += kept
            self._note_slots(request, start, rows)
            cursor += count
        self._next_row += written
        if not pieces:
            return Plan(None, 0, first_row, ())
        indices = None if written == cursor else np.concatenate(pieces)
        return Plan(indices, written, first_row, tuple(spans))

    def _count_kept(self, request: _Request, start: int, count: int) -> int:
        if not request.captured:
            return 0
        if self._prompt_only:
            return max(0, min(count, request.num_prompt_tokens - start))
        return count

    def _note_slots(self, request: _Request, start: int, rows: Rows) -> None:
        """Slots that this step fills hold these rows now; MISSING too, or a stale row would be found there later."""
        slots = self._slots(request, start, len(rows))
        self._slot_rows[slots] = rows[: len(slots)]

    def _fill_from_cache(self, new: NewRequest) -> None:
        request = self._requests[new.key]
        if not request.captured or not new.num_computed_tokens:
            return
        slots = self._slots(request, 0, new.num_computed_tokens)
        request.reserve(new.num_computed_tokens)
        found = self._slot_rows[slots]
        # A resumed request may hit blocks whose rows are unknown, while its own rows of before are still right.
        place = request.rows[: len(found)]
        np.copyto(place, found, where=place == MISSING)

    def _slots(self, request: _Request, start: int, count: int) -> Rows:
        if not len(self._slot_rows):
            return np.empty(0, dtype=np.int64)
        positions = np.arange(start, start + count)
        blocks = np.asarray(request.blocks, dtype=np.int64)
        index = positions // self._block_size
        if count and index[-1] >= len(blocks):
            raise RowError(f"a step computes position {start + count - 1} and the request has {len(blocks)} blocks")
        slots: Rows = blocks[index] * self._block_size + positions % self._block_size
        return slots

    def _copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        for source, destination in copies:
            if not len(self._slot_rows):
                return
            size = self._block_size
            self._slot_rows[destination * size : (destination + 1) * size] = self._slot_rows[
                source * size : (source + 1) * size
            ]
