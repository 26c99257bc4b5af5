"""Which row of a step belongs to which request and position, and where every row of a request went.

Pure accounting: numpy only, no torch, no vLLM. A row has a number, counted over the whole log in the order in which
rows are written. A request is a list of row numbers by position; the last write of a position wins, because pre-empted
requests recompute and rejected speculative tokens are overwritten.

A prefix that vLLM finds in its cache is not computed again, so its rows do not pass by. The request's block table
names the physical KV blocks that hold it, and `slot_rows` says which row filled each slot of each block.

This runs on the thread that runs the model, at every step: a step's requests are accounted for together, by numpy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vllm_overlay.capture.number_lists import NumberLists

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
    """Of a step's rows, the ones to write: their indices in the buffer, the first one's number, whose they are.

    `keys`, `starts` and `lengths` are of the step's requests in the order of their rows: of each, positions
    start .. start+length are written; length 0 is none.
    """

    indices: Rows | None  # None: the first `count` rows of the buffer, without a gap
    count: int
    first_row: int
    keys: tuple[str, ...]
    starts: Rows
    lengths: Rows

    @property
    def spans(self) -> list[Span]:
        """The requests of which something is written."""
        offsets = np.cumsum(self.lengths) - self.lengths
        columns = zip(self.keys, self.starts.tolist(), self.lengths.tolist(), offsets.tolist(), strict=True)
        return [Span(*column) for column in columns if column[2]]

    def find_position(self, row: int) -> tuple[str, int]:
        """The request and position of a row, counted from the first one that is written."""
        ends = np.cumsum(self.lengths)
        at = int(np.searchsorted(ends, row, side="right"))
        return self.keys[at], int(self.starts[at] + row - (ends[at] - self.lengths[at]))


class RowBook:
    """The accounting of one worker.

    `num_slots` is KV blocks times block size of the full-attention group; 0 when the model has none, and then a
    cached prefix cannot be found again and makes an incomplete record.
    """

    def __init__(self, *, block_size: int, num_slots: int, prompt_only: bool = False) -> None:
        self._block_size = block_size
        self._slot_rows: Rows = np.full(num_slots, MISSING, dtype=np.int64)
        self._prompt_only = prompt_only
        self._next_row = 0
        # A live request has a place in these arrays and lists; a place is used again.
        self._places: dict[str, int] = {}
        self._free_places: list[int] = []
        self._captured: NDArray[np.bool_] = np.zeros(0, dtype=np.bool_)
        self._num_prompt_tokens: Rows = np.zeros(0, dtype=np.int64)
        self._num_rows: Rows = np.zeros(0, dtype=np.int64)
        self._num_blocks: Rows = np.zeros(0, dtype=np.int64)
        self._rows = NumberLists(MISSING)
        self._blocks = NumberLists(MISSING)
        # The order of the step before, whose requests' places are known; None when one of them has ended since.
        self._last_order: tuple[str, ...] | None = None
        self._last_places: Rows = np.zeros(0, dtype=np.int64)

    def __contains__(self, key: str) -> bool:
        return key in self._places

    @property
    def num_live(self) -> int:
        return len(self._places)

    @property
    def num_rows(self) -> int:
        """Rows planned so far."""
        return self._next_row

    def plan(self, step: Step) -> Plan:
        """Account for a step. Errors: RowError when the step names a request that was never new."""
        self._copy_blocks(step.copies)
        for new in step.new:
            self._begin(new)
        if step.more_blocks:
            self._add_blocks(step.more_blocks)
        plan = self._assign(step)
        # After the assignment: a request may hit blocks that another one fills in this very step.
        for new in step.new:
            self._fill_from_cache(new)
        return plan

    def find_rows(self, key: str, num_rows: int) -> Rows:
        """The row numbers of positions 0 .. num_rows, MISSING where none is known."""
        place = self._find(key)
        if self._prompt_only:
            num_rows = min(num_rows, int(self._num_prompt_tokens[place]))
        rows = np.full(num_rows, MISSING, dtype=np.int64)
        known = min(num_rows, int(self._num_rows[place]))
        rows[:known] = self._rows.get_list(place, 0, known)
        return rows

    def count_positions(self, key: str) -> int:
        """How many positions there are up to the last that has a row."""
        place = self._find(key)
        rows = self._rows.get_list(place, 0, int(self._num_rows[place]))
        known = np.flatnonzero(rows != MISSING)
        return int(known[-1]) + 1 if len(known) else 0

    def forget(self, key: str) -> None:
        """The request has ended."""
        place = self._places.pop(key)
        self._rows.clear(place)
        self._blocks.clear(place)
        self._free_places.append(place)
        self._last_order = None

    def is_captured(self, key: str) -> bool:
        return bool(self._captured[self._find(key)])

    def find_live_chunks(self, chunk_rows: int) -> set[int]:
        """Of the log in chunks of so many rows, those that a request may still refer to, or come to by its prefix."""
        live = [self._slot_rows]
        live.extend(self._rows.get_list(place, 0, int(self._num_rows[place])) for place in self._places.values())
        chunks = np.zeros(self._next_row // chunk_rows + 1, dtype=np.bool_)
        chunks[-1] = True
        for rows in live:
            chunks[rows[rows != MISSING] // chunk_rows] = True
        return set(np.flatnonzero(chunks).tolist())

    def _find(self, key: str) -> int:
        try:
            return self._places[key]
        except KeyError:
            raise RowError(f"a step computes request {key!r}, which no step announced as new") from None

    def _begin(self, new: NewRequest) -> None:
        place = self._places.get(new.key)
        if place is None:
            if new.resumed:
                raise RowError(f"request {new.key!r} is resumed, and no step announced it as new")
            place = self._take_place()
            self._places[new.key] = place
            self._captured[place] = new.captured
            self._num_prompt_tokens[place] = new.num_prompt_tokens
            self._num_rows[place] = 0
        self._num_blocks[place] = 0
        self._add_blocks({new.key: new.blocks})

    def _take_place(self) -> int:
        if not self._free_places:
            used = len(self._captured)
            more = max(16, used)
            self._captured = np.pad(self._captured, (0, more))
            self._num_prompt_tokens = np.pad(self._num_prompt_tokens, (0, more))
            self._num_rows = np.pad(self._num_rows, (0, more))
            self._num_blocks = np.pad(self._num_blocks, (0, more))
            self._free_places = list(range(used + more - 1, used - 1, -1))
        return self._free_places.pop()

    def _add_blocks(self, blocks: Mapping[str, Sequence[int]]) -> None:
        places = np.array([self._find(key) for key in blocks], dtype=np.int64)
        counts = np.array([len(each) for each in blocks.values()], dtype=np.int64)
        starts = self._num_blocks[places]
        self._blocks.make_room(places, starts + counts)
        added = np.array([block for each in blocks.values() for block in each], dtype=np.int64)
        self._blocks.set(np.repeat(places, counts), _count_from(starts, counts), added)
        self._num_blocks[places] = starts + counts

    def _assign(self, step: Step) -> Plan:
        if len(step.order) != len(step.scheduled):
            raise RowError(f"the step schedules {len(step.scheduled)} requests and its batch holds {len(step.order)}")
        places = self._find_all(step.order)
        starts = _look_up(_merge_starts(step), step.order)
        counts = _look_up(step.scheduled, step.order)
        kept = self._count_kept(places, starts, counts)
        first_row, written, computed = self._next_row, int(kept.sum()), int(counts.sum())
        # One entry for each row of the buffer from here on.
        positions, row_places = starts, places
        if computed > len(places):
            positions, row_places = _count_from(starts, counts), np.repeat(places, counts)
        rows: Rows = np.arange(first_row, first_row + computed)
        if written == computed:
            indices = None
            self._place_rows(places, starts, starts + counts)
            self._rows.set(row_places, positions, rows)
        else:
            is_kept = positions < np.repeat(starts + kept, counts)
            indices = np.flatnonzero(is_kept)
            rows = np.where(is_kept, first_row + np.cumsum(is_kept) - 1, MISSING)
            some = kept > 0
            self._place_rows(places[some], starts[some], (starts + kept)[some])
            self._rows.set(row_places[indices], positions[indices], rows[indices])
        if len(self._slot_rows):
            self._require_blocks(places, starts + counts - 1)
            # MISSING too, or a stale row would be found there later.
            self._slot_rows[self._slots(row_places, positions)] = rows
        self._next_row += written
        return Plan(indices, written, first_row, step.order, starts, kept)

    def _find_all(self, order: tuple[str, ...]) -> Rows:
        if order != self._last_order:
            self._last_places = np.array([self._find(key) for key in order], dtype=np.int64)
            self._last_order = order
        return self._last_places

    def _count_kept(self, places: Rows, starts: Rows, counts: Rows) -> Rows:
        """Of each request's positions, how many are written: always the first ones."""
        if self._prompt_only:
            counts = np.clip(self._num_prompt_tokens[places] - starts, 0, counts)
        return counts * self._captured[places]

    def _place_rows(self, places: Rows, starts: Rows, ends: Rows) -> None:
        """Room for positions start .. end, which are each list's last: what was behind them is superseded."""
        self._rows.make_room(places, ends)
        known = self._num_rows[places]
        for at in np.flatnonzero(known < starts).tolist():
            gap = np.full(int(starts[at] - known[at]), MISSING, dtype=np.int64)
            self._rows.set_list(int(places[at]), int(known[at]), gap)
        self._num_rows[places] = ends

    def _fill_from_cache(self, new: NewRequest) -> None:
        place = self._places[new.key]
        if not self._captured[place] or not new.num_computed_tokens or not len(self._slot_rows):
            return
        self._require_blocks(np.array([place]), np.array([new.num_computed_tokens - 1]))
        positions = np.arange(min(new.num_computed_tokens, int(self._num_rows[place])))
        places = np.full_like(positions, place)
        found = self._slot_rows[self._slots(places, positions)]
        # A resumed request may hit blocks whose rows are unknown, while its own rows of before are still right.
        own = self._rows.get(places, positions)
        self._rows.set(places, positions, np.where(own == MISSING, found, own))

    def _slots(self, places: Rows, positions: Rows) -> Rows:
        blocks = self._blocks.get(places, positions // self._block_size)
        return blocks * self._block_size + positions % self._block_size

    def _require_blocks(self, places: Rows, positions: Rows) -> None:
        """Each request has a block for this position of it."""
        lacking = np.flatnonzero(positions // self._block_size >= self._num_blocks[places])
        if len(lacking):
            position, count = positions[lacking[0]], self._num_blocks[places[lacking[0]]]
            raise RowError(f"a step computes position {position} and the request has {count} blocks")

    def _copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        for source, destination in copies:
            if not len(self._slot_rows):
                return
            size = self._block_size
            self._slot_rows[destination * size : (destination + 1) * size] = self._slot_rows[
                source * size : (source + 1) * size
            ]


def _merge_starts(step: Step) -> Mapping[str, int]:
    """The first position computed, of every request."""
    return {**step.starts, **{new.key: new.num_computed_tokens for new in step.new}} if step.new else step.starts


def _look_up(values: Mapping[str, int], order: Sequence[str]) -> Rows:
    try:
        return np.fromiter(map(values.__getitem__, order), dtype=np.int64, count=len(order))
    except KeyError as error:
        raise RowError(f"the step's batch holds request {error.args[0]!r} and the step does not schedule it") from None


def _count_from(starts: Rows, counts: Rows) -> Rows:
    """start, start + 1, ... of each pair, as many as its count, one after the other."""
    before = np.cumsum(counts) - counts
    spread: Rows = np.arange(int(counts.sum())) + np.repeat(starts - before, counts)
    return spread
