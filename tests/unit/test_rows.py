"""Row accounting against a model of the scheduler: every (request, position) gets the row that was computed for it."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_overlay.capture.rows import MISSING, NewRequest, RowBook, RowError, Step

BLOCK = 4


def new(
    key: str, prompt: int, computed: int, blocks: list[int], captured: bool = True, resumed: bool = False
) -> NewRequest:
    return NewRequest(key, prompt, computed, tuple(blocks), captured, resumed)


def step(scheduled: dict[str, int], *, new: tuple[NewRequest, ...] = (), starts: dict[str, int] | None = None,
         blocks: dict[str, tuple[int, ...]] | None = None, order: tuple[str, ...] | None = None) -> Step:  # fmt: skip
    return Step(new, starts or {}, blocks or {}, scheduled, order or tuple(scheduled))


def book(**options: bool) -> RowBook:
    return RowBook(block_size=BLOCK, num_slots=64 * BLOCK, **options)


def test_rows_follow_the_order_of_the_batch() -> None:
    rows = book()
    plan = rows.plan(step({"a": 3, "b": 2}, new=(new("a", 3, 0, [1]), new("b", 2, 0, [2])), order=("b", "a")))
    assert [(s.key, s.start, s.length, s.offset) for s in plan.spans] == [("b", 0, 2, 0), ("a", 0, 3, 2)]
    assert plan.indices is None
    assert rows.find_rows("a", 3).tolist() == [2, 3, 4]
    assert rows.find_rows("b", 2).tolist() == [0, 1]


def test_a_cached_prefix_refers_to_the_rows_that_filled_its_blocks() -> None:
    rows = book()
    rows.plan(step({"a": 8}, new=(new("a", 8, 0, [5, 6]),)))
    plan = rows.plan(step({"b": 2}, new=(new("b", 10, 8, [5, 6, 7]),)))
    assert plan.first_row == 8
    assert rows.find_rows("b", 10).tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]


def test_a_prefix_filled_in_the_very_same_step_is_found() -> None:
    """vLLM marks blocks as cached when it schedules them, so a neighbour in the batch may hit them at once."""
    rows = book()
    both = (new("a", 6, 0, [1, 2]), new("b", 6, 4, [1, 3]))
    rows.plan(step({"a": 6, "b": 2}, new=both))
    assert rows.find_rows("b", 6).tolist() == [0, 1, 2, 3, 6, 7]


def test_blocks_filled_by_an_uncaptured_request_make_holes() -> None:
    rows = book()
    rows.plan(step({"a": 4}, new=(new("a", 4, 0, [1]),)))
    rows.plan(step({"off": 4}, new=(new("off", 4, 0, [1], captured=False),)))
    rows.plan(step({"b": 1}, new=(new("b", 5, 4, [1, 2]),)))
    assert rows.find_rows("b", 5).tolist() == [MISSING] * 4 + [4]


def test_preemption_recomputes_and_the_last_write_wins() -> None:
    """CASES 5: prefill 20 of 40, pre-empt, resume from 0, finish, 3 decode steps: each position once."""
    rows = book()
    rows.plan(step({"a": 20}, new=(new("a", 40, 0, [1, 2, 3, 4, 5]),)))
    blocks = list(range(10, 20))
    rows.plan(step({"a": 40}, new=(new("a", 0, 0, blocks, resumed=True),)))
    for position in (40, 41, 42):
        rows.plan(step({"a": 1}, starts={"a": position}, blocks={"a": (20,) if position == 40 else ()}))
    assert rows.find_rows("a", 43).tolist() == list(range(20, 63))


def test_rejected_draft_tokens_are_overwritten() -> None:
    rows = book()
    rows.plan(step({"a": 4}, new=(new("a", 4, 0, [1, 2, 3]),)))
    rows.plan(step({"a": 4}, starts={"a": 4}))  # one token and three drafts, of which none is accepted
    rows.plan(step({"a": 4}, starts={"a": 5}))
    assert rows.find_rows("a", 6).tolist() == [0, 1, 2, 3, 4, 8]


def test_prompt_only_writes_no_generated_row() -> None:
    rows = book(prompt_only=True)
    rows.plan(step({"a": 3}, new=(new("a", 3, 0, [1]),)))
    assert rows.plan(step({"a": 1}, starts={"a": 3})).count == 0
    assert rows.find_rows("a", 4).tolist() == [0, 1, 2]


def test_uncaptured_rows_are_left_out_by_index() -> None:
    rows = book()
    both = (new("off", 2, 0, [1], captured=False), new("a", 3, 0, [2]))
    plan = rows.plan(step({"off": 2, "a": 3}, new=both))
    assert plan.indices is not None
    assert plan.indices.tolist() == [2, 3, 4]
    assert plan.count == 3


def test_a_place_that_is_used_again_has_no_row_of_before() -> None:
    rows = book()
    rows.plan(step({"a": 4}, new=(new("a", 4, 0, [1]),)))
    rows.forget("a")
    rows.plan(step({"b": 1}, new=(new("b", 9, 8, [8, 9, 10]),)))
    assert rows.find_rows("b", 9).tolist() == [MISSING] * 8 + [4]


def test_requests_that_come_again_in_the_same_order_are_new_ones() -> None:
    rows = book()
    announced = (new("a", 2, 0, [1]), new("b", 2, 0, [2]))
    for first_row in (0, 4):
        rows.plan(step({"a": 2, "b": 2}, new=announced))
        assert rows.find_rows("a", 2).tolist() == [first_row, first_row + 1]
        assert rows.find_rows("b", 2).tolist() == [first_row + 2, first_row + 3]
        rows.forget("a")
        rows.forget("b")
    with pytest.raises(RowError, match="'a', which no step announced"):
        rows.plan(step({"a": 1, "b": 1}, starts={"a": 2, "b": 2}))


def test_what_a_recomputation_left_behind_is_not_found_behind_a_gap() -> None:
    """Computed to 6, recomputed to 2, and then on from 4: nobody said where 2 and 3 are now."""
    rows = book()
    rows.plan(step({"a": 6}, new=(new("a", 8, 0, [1, 2]),)))
    rows.plan(step({"a": 2}, new=(new("a", 8, 0, [3, 4], resumed=True),)))
    rows.plan(step({"a": 1}, starts={"a": 4}))
    assert rows.find_rows("a", 6).tolist() == [6, 7, MISSING, MISSING, 8, MISSING]


def test_long_requests_and_many_of_them() -> None:
    """More positions than a page of NumberLists, more requests than it begins with."""
    keys = [f"r{number}" for number in range(90)]
    rows = RowBook(block_size=BLOCK, num_slots=90 * 200 * BLOCK)
    announced = tuple(new(key, 500, 0, list(range(200 * n, 200 * n + 200))) for n, key in enumerate(keys))
    rows.plan(step(dict.fromkeys(keys, 500), new=announced))
    for position in range(500, 520):
        plan = rows.plan(step(dict.fromkeys(keys, 1), starts=dict.fromkeys(keys, position), order=tuple(keys[::-1])))
    first_decoded = 90 * 500
    for number in (0, 44, 89):
        expected = list(range(500 * number, 500 * number + 500))
        expected += [first_decoded + 90 * step + 89 - number for step in range(20)]
        assert rows.find_rows(keys[number], 520).tolist() == expected
    assert plan.find_position(0) == ("r89", 519) and plan.find_position(89) == ("r0", 519)


def test_the_position_of_a_row_is_found_among_requests_without_one() -> None:
    rows = book(prompt_only=True)
    announced = (new("a", 2, 0, [1]), new("off", 3, 0, [2], captured=False), new("b", 3, 0, [3]))
    plan = rows.plan(step({"a": 2, "off": 3, "b": 3}, new=announced))
    assert [plan.find_position(row) for row in range(5)] == [("a", 0), ("a", 1), ("b", 0), ("b", 1), ("b", 2)]


def test_chunks_live_as_long_as_a_request_or_a_slot_refers_to_them() -> None:
    rows = book()
    rows.plan(step({"a": 4}, new=(new("a", 4, 0, [1]),)))  # rows 0 .. 3
    rows.plan(step({"b": 8}, new=(new("b", 8, 0, [2, 3]),)))  # 4 .. 11
    assert rows.find_live_chunks(2) == {0, 1, 2, 3, 4, 5, 6}
    rows.forget("a")
    assert rows.find_live_chunks(2) >= {0, 1}, "a later request may hit block 1"
    rows.plan(step({"c": 4}, new=(new("c", 4, 0, [1]),)))  # 12 .. 15
    assert rows.find_live_chunks(2) == {2, 3, 4, 5, 6, 7, 8}
    rows.plan(step({"d": 8}, new=(new("d", 8, 0, [2, 3]),)))  # 16 .. 23, over b's slots
    assert rows.find_live_chunks(2) >= {2, 3, 4, 5}, "b lives"
    rows.forget("b")
    assert rows.find_live_chunks(2) == {6, 7, 8, 9, 10, 11, 12}


def test_requests_without_any_row_are_asked_like_others() -> None:
    rows, keys = book(), [f"off{number}" for number in range(40)]
    announced = tuple(new(key, 1, 0, [number], captured=False) for number, key in enumerate(keys))
    rows.plan(step(dict.fromkeys(keys, 1), new=announced))
    assert rows.find_rows("off39", 1).tolist() == [MISSING]
    assert rows.count_positions("off39") == 0
    assert rows.find_live_chunks(4) == {0}


def test_a_batch_that_the_step_does_not_schedule_is_an_error() -> None:
    rows = book()
    rows.plan(step({"a": 1}, new=(new("a", 1, 0, [1]),)))
    with pytest.raises(RowError, match="batch holds request 'a' and the step does not schedule it"):
        rows.plan(Step((), {"b": 1}, {}, {"b": 1}, ("a",)))


def test_an_unannounced_request_is_an_error() -> None:
    with pytest.raises(RowError, match="'ghost', which no step announced"):
        book().plan(step({"ghost": 1}, starts={"ghost": 0}))


def test_a_block_copied_before_the_step_takes_its_rows_along() -> None:
    rows = book()
    rows.plan(step({"a": 4}, new=(new("a", 4, 0, [1]),)))
    copied = Step((new("b", 4, 3, [9]),), {}, {}, {"b": 1}, ("b",), copies=((1, 9),))
    rows.plan(copied)
    assert rows.find_rows("b", 4).tolist() == [0, 1, 2, 4]


@dataclass
class Ruler:
    """A scheduler with a prefix cache and a model whose row for (request text, position) is a known code.

    `written` is the log: the code of every row, in order. Prefixes are shared between requests of one family.
    """

    book: RowBook = field(default_factory=lambda: RowBook(block_size=BLOCK, num_slots=4096 * BLOCK))
    written: list[tuple[int, int]] = field(default_factory=list)
    cache: dict[tuple[int, int], int] = field(default_factory=dict)  # (family, block index) -> block
    next_block: int = 1
    running: dict[str, Running] = field(default_factory=dict)

    def allocate(self) -> int:
        self.next_block += 1
        return self.next_block


@dataclass
class Running:
    family: int
    length: int
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    announced: bool = False


@st.composite
def streams(draw: st.DrawFn) -> list[list[tuple[int, int, bool]]]:
    """Steps; each a list of (request, positions to compute, pre-empt first)."""
    entry = st.tuples(st.integers(0, 5), st.integers(1, 9), st.booleans())
    return draw(st.lists(st.lists(entry, min_size=1, max_size=4, unique_by=lambda e: e[0]), min_size=1, max_size=12))


def play(ruler: Ruler, stream: list[list[tuple[int, int, bool]]]) -> None:
    for entries in stream:
        announced: list[NewRequest] = []
        starts: dict[str, int] = {}
        more: dict[str, tuple[int, ...]] = {}
        scheduled: dict[str, int] = {}
        for number, count, preempt in entries:
            key, family = f"r{number}", number % 2
            request = ruler.running.setdefault(key, Running(family, 10 + 3 * number))
            if preempt and request.announced:
                request.computed, request.blocks = 0, []
            resumed = request.announced
            fresh = not request.blocks
            if fresh:
                while (family, len(request.blocks)) in ruler.cache and (
                    len(request.blocks) + 1
                ) * BLOCK < request.length:
                    request.blocks.append(ruler.cache[family, len(request.blocks)])
                request.computed = len(request.blocks) * BLOCK
            had = len(request.blocks)
            count = min(count, request.length - request.computed)
            if count <= 0:
                continue
            end = request.computed + count
            while len(request.blocks) * BLOCK < end:
                request.blocks.append(ruler.allocate())
            for index in range(end // BLOCK):
                ruler.cache.setdefault((family, index), request.blocks[index])
            if fresh:
                announced.append(new(key, request.length, request.computed, request.blocks, resumed=resumed))
            else:
                starts[key] = request.computed
                more[key] = tuple(request.blocks[had:])
            request.announced = True
            scheduled[key] = count
        order = tuple(sorted(scheduled, reverse=True))
        if not order:
            continue
        ruler.book.plan(Step(tuple(announced), starts, more, scheduled, order))
        for key in order:
            request = ruler.running[key]
            for position in range(request.computed, request.computed + scheduled[key]):
                ruler.written.append((request.family, position))
            request.computed += scheduled[key]


@settings(max_examples=300, deadline=None)
@given(streams())
def test_any_interleaving_gives_every_position_its_own_code(stream: list[list[tuple[int, int, bool]]]) -> None:
    ruler = Ruler()
    play(ruler, stream)
    for key, request in ruler.running.items():
        if not request.announced:
            continue
        rows = ruler.book.find_rows(key, request.computed)
        assert (rows != MISSING).all(), (key, rows)
        assert [ruler.written[row] for row in rows] == [(request.family, p) for p in range(request.computed)]
        assert np.unique(rows).size == rows.size
