"""Which row of a step belongs to which request and position, and where every row of a request went.

Pure accounting: numpy only, no torch, no vLLM. A row has a number, counted over the whole log in the order in which
rows are written. A request is an array of row numbers by position; the last write of a position wins, because
pre-empted requests recompute and rejected speculative tokens are overwritten.

A prefix that vLLM finds in its cache is not computed again, so its rows do not pass by. The request's block table
names the physical KV blocks that hold it, and `slot_rows` says which row filled each slot of each block.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

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


class Span(NamedTuple):
    """Positions `start .. start+length` of a request, in rows `offset .. offset+length` of what is written."""

    key: str
    start: int
    length: int
    offset: int


@dataclass(frozen=True)
class Plan:
    """Of a step's rows, the ones to write: their indices in the buffer, the first one's number, whose they are."""

    indices: Rows | None  # None: the first `count` rows of the buffer, without a gap
    count: int
    first_row: int
    spans: list[Span]


@dataclass
class _Request:
    captured: bool
    num_prompt_tokens: int
    blocks: list[int]
    # Row numbers by position. A growing array and not numpy: a decode step appends one number to each of hundreds.
    rows: array[int] = field(default_factory=lambda: array("q"))

    def place(self, start: int, count: int, first_row: int) -> None:
        """Positions start .. start+count have the rows from `first_row` on; what was there before is superseded."""
        if start > len(self.rows):
            self.rows.extend([MISSING] * (start - len(self.rows)))
        if count == 1 and start == len(self.rows):
            self.rows.append(first_row)
            return
        del self.rows[start + count :]
        numbers = array("q", np.arange(first_row, first_row + count, dtype=np.int64).tobytes())
        self.rows[start : start + count] = numbers

    def row_numbers(self) -> Rows:
        """A copy, int64 `[positions]`."""
        return np.array(self.rows, dtype=np.int64)


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
        rows = np.full(num_rows, MISSING, dtype=np.int64)
        known = request.row_numbers()[:num_rows]
        rows[: len(known)] = known
        return rows

    def count_leading_rows(self, key: str) -> int:
        """How many positions from the first on have a row."""
        rows = self._find(key).row_numbers()
        missing = np.flatnonzero(rows == MISSING)
        return int(missing[0]) if len(missing) else len(rows)

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
        if len(step.order) != len(step.scheduled):
            raise RowError(f"the step schedules {len(step.scheduled)} requests and its batch holds {len(step.order)}")
        spans: list[Span] = []
        kept_places: list[tuple[int, int]] = []  # (first buffer row, count)
        first_row, cursor, written = self._next_row, 0, 0
        slots, slot_rows = _Slots(), self._slot_rows
        for key in step.order:
            request, start, count = self._find(key), starts[key], step.scheduled[key]
            kept = self._count_kept(request, start, count)
            if kept:
                request.place(start, kept, first_row + written)
                spans.append(Span(key, start, kept, written))
                kept_places.append((cursor, kept))
            if len(slot_rows):
                self._note_slots(slots, request, start, count, kept, first_row + written)
            written += kept
            cursor += count
        slots.write_into(slot_rows)
        self._next_row += written
        indices = None if written == cursor else _spread(kept_places)
        return Plan(indices, written, first_row, spans)

    def _count_kept(self, request: _Request, start: int, count: int) -> int:
        if not request.captured:
            return 0
        if self._prompt_only:
            return max(0, min(count, request.num_prompt_tokens - start))
        return count

    def _note_slots(self, slots: _Slots, request: _Request, start: int, count: int, kept: int, first_row: int) -> None:
        """Slots that this step fills hold these rows now; MISSING too, or a stale row would be found there later."""
        if count == 1:
            block, place = divmod(start, self._block_size)
            self._require_block(request, block, start)
            slots.add_one(request.blocks[block] * self._block_size + place, first_row if kept else MISSING)
            return
        rows = np.full(count, MISSING, dtype=np.int64)
        rows[:kept] = np.arange(first_row, first_row + kept)
        slots.add_many(self._slots(request, start, count), rows)

    def _fill_from_cache(self, new: NewRequest) -> None:
        request = self._requests[new.key]
        if not request.captured or not new.num_computed_tokens or not len(self._slot_rows):
            return
        found = self._slot_rows[self._slots(request, 0, new.num_computed_tokens)]
        # A resumed request may hit blocks whose rows are unknown, while its own rows of before are still right.
        place = request.row_numbers()[: len(found)]
        merged = np.where(place == MISSING, found[: len(place)], place)
        request.rows[: len(merged)] = array("q", merged.tobytes())

    def _slots(self, request: _Request, start: int, count: int) -> Rows:
        positions = np.arange(start, start + count)
        index = positions // self._block_size
        self._require_block(request, int(index[-1]), start + count - 1)
        blocks = np.array(request.blocks, dtype=np.int64)
        slots: Rows = blocks[index] * self._block_size + positions % self._block_size
        return slots

    def _require_block(self, request: _Request, block: int, position: int) -> None:
        if block >= len(request.blocks):
            raise RowError(f"a step computes position {position} and the request has {len(request.blocks)} blocks")

    def _copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        for source, destination in copies:
            if not len(self._slot_rows):
                return
            size = self._block_size
            self._slot_rows[destination * size : (destination + 1) * size] = self._slot_rows[
                source * size : (source + 1) * size
            ]


class _Slots:
    """Slots that a step fills and the rows they hold then, gathered so that one assignment writes them all."""

    def __init__(self) -> None:
        self._single_slots: list[int] = []
        self._single_rows: list[int] = []
        self._many: list[tuple[Rows, Rows]] = []

    def add_one(self, slot: int, row: int) -> None:
        self._single_slots.append(slot)
        self._single_rows.append(row)

    def add_many(self, slots: Rows, rows: Rows) -> None:
        self._many.append((slots, rows))

    def write_into(self, slot_rows: Rows) -> None:
        if self._single_slots:
            slot_rows[self._single_slots] = self._single_rows
        for slots, rows in self._many:
            slot_rows[slots] = rows


def _spread(places: Sequence[tuple[int, int]]) -> Rows:
    """(first, count) pairs as the indices they stand for."""
    if not places:
        return np.empty(0, dtype=np.int64)
    return np.concatenate([np.arange(first, first + count) for first, count in places])
