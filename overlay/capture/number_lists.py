"""Growing lists of numbers, of which hundreds are read and written in one call of numpy.

A decode step adds one number to the list of each of its requests: a loop over them would cost more than anything else
that capture does in the step. So the lists lie in pages of one array, as vLLM's KV cache does, and are named by place.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.int64]

PAGE = 256


class NumberLists:
    """Lists of int64 at places 0, 1, 2, ... What was never written in a list is `blank`."""

    def __init__(self, blank: int) -> None:
        self._blank = blank
        self._pages: Numbers = np.full(64 * PAGE, blank, dtype=np.int64)
        self._free = list(range(64))
        # The number of the first entry of each page of each list.
        self._table: Numbers = np.zeros((16, 4), dtype=np.int64)
        self._num_pages: Numbers = np.zeros(16, dtype=np.int64)

    def get(self, places: Numbers, positions: Numbers) -> Numbers:
        """What is at these positions of the lists at these places; both `[n]`, and room was made for them."""
        found: Numbers = self._pages[self._table[places, positions // PAGE] + positions % PAGE]
        return found

    def set(self, places: Numbers, positions: Numbers, values: Numbers) -> None:
        """Write values there; all `[n]`, and room was made for them."""
        self._pages[self._table[places, positions // PAGE] + positions % PAGE] = values

    def get_list(self, place: int, start: int, end: int) -> Numbers:
        """A copy of positions start .. end of one list."""
        # A slice of places, not one: an empty list may have no place in the table yet.
        starts = self._table[place : place + 1, : -(-end // PAGE)].reshape(-1)
        whole: Numbers = self._pages.reshape(-1, PAGE)[starts // PAGE].reshape(-1)
        return whole[start:end]

    def set_list(self, place: int, start: int, values: Numbers) -> None:
        """Write values from position `start` of one list on."""
        positions = np.arange(start, start + len(values))
        self.set(np.full_like(positions, place), positions, values)

    def make_room(self, places: Numbers, lengths: Numbers) -> None:
        """Lists at these places, none of them twice, can be read and written up to these lengths; both `[n]`."""
        if not len(places):
            return
        most = int(places.max())
        if most >= len(self._num_pages):
            more = most + 1  # at least twice as many as before
            self._table = np.pad(self._table, ((0, more), (0, 0)))
            self._num_pages = np.pad(self._num_pages, (0, more))
        wanted = -(-lengths // PAGE)
        for at in np.flatnonzero(wanted > self._num_pages[places]).tolist():
            self._add_pages(int(places[at]), int(wanted[at]))

    def clear(self, place: int) -> None:
        """The list at this place is empty and its pages are free."""
        if place < len(self._num_pages):
            count = int(self._num_pages[place])
            self._free.extend((self._table[place, :count] // PAGE).tolist())
            self._num_pages[place] = 0

    def _add_pages(self, place: int, wanted: int) -> None:
        if wanted > self._table.shape[1]:
            self._table = np.pad(self._table, ((0, 0), (0, wanted)))
        for number in range(int(self._num_pages[place]), wanted):
            if not self._free:
                self._double()
            start = self._free.pop() * PAGE
            self._pages[start : start + PAGE] = self._blank
            self._table[place, number] = start
        self._num_pages[place] = wanted

    def _double(self) -> None:
        count = len(self._pages) // PAGE
        self._free = list(range(count, 2 * count))
        self._pages = np.concatenate([self._pages, np.full_like(self._pages, self._blank)])
