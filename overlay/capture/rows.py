"""Which row of a step belongs to which request and position, and where every row of a request went.

Pure accounting: numpy only, no torch, no vLLM. A row has a number, counted over the whole log in the order in which
rows are written. Of a request, the rows of a window of positions are written: all of them, some, or none. It is a list
of row numbers by position, from the window's first on; the last write of a position wins, because pre-empted requests
recompute and rejected speculative tokens are overwritten.

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
END = 2**62  # behind every position


class RowError(RuntimeError):
    """The step does not add up: vLLM said one thing and did another."""


class Window(NamedTuple):
    """Positions `start` .. `end` of a request, whose rows are kept."""

    start: int
    end: int


WHOLE, NOTHING = Window(0, END), Window(0, 0)


@dataclass(frozen=True)
class NewRequest:
    """A request that a step schedules for the first time, or again after it was pre-empted (`resumed`).

    `window` is looked at the first time only.
    """

    key: str
    num_computed_tokens: int
    blocks: tuple[int, ...]
    window: Window = NOTHING
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

    def __init__(self, *, block_size: int, num_slots: int) -> None:
        self._block_size = block_size
        self._slot_rows: Rows = np.full(num_slots, MISSING, dtype=np.int64)
        self._next_row = 0
        # A live request has a place in these arrays and lists; a place is used again.
        self._places: dict[str, int] = {}
        self._free_places: list[int] = []
        self._window_starts: Rows = np.zeros(0, dtype=np.int64)
        self._window_ends: Rows = np.zeros(0, dtype=np.int64)
        self._num_rows: Rows = np.zeros(0, dtype=np.int64)
        self._num_blocks: Rows = np.zeros(0, dtype=np.int64)
        self._rows = NumberLists(MISSING)  # from each window's start on
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

    def find_rows(self, key: str, num_positions: int) -> Rows:
        """The row numbers of the window's positions below num_positions, MISSING where none is known."""
        place = self._find(key)
        count = max(0, min(num_positions, int(self._window_ends[place])) - int(self._window_starts[place]))
        rows = np.full(count, MISSING, dtype=np.int64)
        known = min(count, int(self._num_rows[place]))
        rows[:known] = self._rows.get_list(place, 0, known)
        return rows

    def count_positions(self, key: str) -> int:
        """How many positions there are up to the last that has a row."""
        place = self._find(key)
        rows = self._rows.get_list(place, 0, int(self._num_rows[place]))
        known = np.flatnonzero(rows != MISSING)
        return int(self._window_starts[place] + known[-1]) + 1 if len(known) else 0

    def forget(self, key: str) -> None:
        """The request has ended."""
        place = self._places.pop(key)
        self._rows.clear(place)
        self._blocks.clear(place)
        self._free_places.append(place)
        self._last_order = None

    def is_captured(self, key: str) -> bool:
        """Whether rows of it are kept, if it comes to them."""
        place = self._find(key)
        return bool(self._window_starts[place] < self._window_ends[place])

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
            self._window_starts[place], self._window_ends[place] = new.window
            self._num_rows[place] = 0
        self._num_blocks[place] = 0
        self._add_blocks({new.key: new.blocks})

    def _take_place(self) -> int:
        if not self._free_places:
            used = len(self._num_rows)
            more = max(16, used)
            self._window_starts = np.pad(self._window_starts, (0, more))
            self._window_ends = np.pad(self._window_ends, (0, more))
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
        ends = starts + counts
        # Of each request's positions, those in its window are written: first .. first + kept.
        window_starts, window_ends = self._window_starts[places], self._window_ends[places]
        firsts = np.minimum(np.maximum(starts, window_starts), window_ends)
        kept = np.minimum(np.maximum(ends, window_starts), window_ends) - firsts
        first_row, written, computed = self._next_row, int(kept.sum()), int(counts.sum())
        numbers: Rows = np.arange(first_row, first_row + written)
        indices, rows = None, numbers
        if written < computed:
            # One entry for each row of the buffer.
            indices = _count_from(np.cumsum(counts) - counts + firsts - starts, kept)
            rows = np.full(computed, MISSING, dtype=np.int64)
            rows[indices] = numbers
        if written:
            self._set_rows(places, firsts - window_starts, kept, numbers)
        if len(self._slot_rows):
            self._require_blocks(places, ends - 1)
            # MISSING too, or a stale row would be found there later.
            self._slot_rows[self._slots(*_spread(places, starts, counts, computed))] = rows
        self._next_row += written
        return Plan(indices, written, first_row, step.order, firsts, kept)

    def _find_all(self, order: tuple[str, ...]) -> Rows:
        if order != self._last_order:
            self._last_places = np.array([self._find(key) for key in order], dtype=np.int64)
            self._last_order = order
        return self._last_places

    def _set_rows(self, places: Rows, starts: Rows, counts: Rows, rows: Rows) -> None:
        """Write entries start .. start + count of each list. A list of which the count is 0 stays as it is.

        What is behind them stays as well: rows from before a pre-emption are those of the same tokens, and a rejected
        draft's row is written again before its position is one of the request's.
        """
        some = counts > 0
        if not some.all():
            places, starts, counts = places[some], starts[some], counts[some]
        ends = starts + counts
        for at in np.flatnonzero(self._num_rows[places] < starts).tolist():
            self._fill_gap(int(places[at]), int(starts[at]))
        self._rows.make_room(places, ends)
        self._num_rows[places] = np.maximum(self._num_rows[places], ends)
        self._rows.set(*_spread(places, starts, counts, len(rows)), rows)

    def _fill_gap(self, place: int, end: int) -> None:
        """The list has `end` entries at least: MISSING where it had none."""
        known = int(self._num_rows[place])
        if known < end:
            self._rows.make_room(np.array([place]), np.array([end]))
            self._rows.set_list(place, known, np.full(end - known, MISSING, dtype=np.int64))
            self._num_rows[place] = end

    def _fill_from_cache(self, new: NewRequest) -> None:
        place = self._places[new.key]
        start, end = int(self._window_starts[place]), min(int(self._window_ends[place]), new.num_computed_tokens)
        if start >= end or not len(self._slot_rows):
            return
        self._require_blocks(np.array([place]), np.array([new.num_computed_tokens - 1]))
        self._fill_gap(place, end - start)
        positions = np.arange(start, end)
        places = np.full_like(positions, place)
        found = self._slot_rows[self._slots(places, positions)]
        # A resumed request may hit blocks whose rows are unknown, while its own rows of before are still right.
        own = self._rows.get(places, positions - start)
        self._rows.set(places, positions - start, np.where(own == MISSING, found, own))

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


def _spread(places: Rows, starts: Rows, counts: Rows, total: int) -> tuple[Rows, Rows]:
    """The place and the position of start .. start + count of each, none of them empty; both `[total]`."""
    if total == len(places):
        return places, starts
    return np.repeat(places, counts), _count_from(starts, counts)


def _count_from(starts: Rows, counts: Rows) -> Rows:
    """start, start + 1, ... of each pair, as many as its count, one after the other."""
    before = np.cumsum(counts) - counts
    spread: Rows = np.arange(int(counts.sum())) + np.repeat(starts - before, counts)
    return spread
