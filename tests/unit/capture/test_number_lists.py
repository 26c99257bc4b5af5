"""Lists in pages, against Python's own lists."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_overlay.capture import number_lists
from vllm_overlay.capture.number_lists import NumberLists

# (place, entries to add, clear first) of some places, each at most once; written together.
rounds = st.lists(
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 9), st.booleans()), max_size=5, unique_by=lambda e: e[0]),
    max_size=30,
)


@settings(max_examples=200, deadline=None)
@given(rounds)
def test_lists_hold_what_was_written(entries_of_rounds: list[list[tuple[int, int, bool]]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(number_lists, "PAGE", 2)
        lists, expected, value = NumberLists(-1), {}, 0
        for entries in entries_of_rounds:
            places, positions, values = [], [], []
            for place, count, clear in entries:
                if clear:
                    lists.clear(place)
                    expected[place] = []
                own = expected.setdefault(place, [])
                for _ in range(count):
                    places.append(place)
                    positions.append(len(own))
                    values.append(value)
                    own.append(value)
                    value += 1
            named = [place for place, _, _ in entries]
            lists.make_room(np.array(named, dtype=int), np.array([len(expected[p]) for p in named], dtype=int))
            lists.set(np.array(places, dtype=int), np.array(positions, dtype=int), np.array(values, dtype=int))
        for place, own in expected.items():
            assert lists.get_list(place, 0, len(own)).tolist() == own


def test_a_page_that_is_used_again_is_blank() -> None:
    lists = NumberLists(-1)
    lists.make_room(np.array([0]), np.array([3]))
    lists.set_list(0, 0, np.array([7, 8, 9]))
    lists.clear(0)
    lists.make_room(np.array([5]), np.array([3]))
    assert lists.get_list(5, 0, 3).tolist() == [-1, -1, -1]


def test_a_thousand_long_lists_share_the_pages_that_they_need() -> None:
    lists, places = NumberLists(-1), np.arange(1000)
    for position in range(300):
        lists.make_room(places, np.full_like(places, position + 1))
        lists.set(places, np.full_like(places, position), places * 1000 + position)
    assert lists.get_list(999, 0, 300).tolist() == list(range(999_000, 999_300))
    assert lists.get_list(0, 250, 260).tolist() == list(range(250, 260))
    assert len(lists._pages) == 2048 * number_lists.PAGE
