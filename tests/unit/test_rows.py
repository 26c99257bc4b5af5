"""Row accounting, one situation at a time. test_step_streams.py plays whole streams of steps."""

from __future__ import annotations

import pytest

from vllm_overlay.capture.rows import END, MISSING, NOTHING, WHOLE, NewRequest, RowBook, RowError, Step, Window

BLOCK = 4


def new(key: str, computed: int, blocks: list[int], window: Window = WHOLE, resumed: bool = False) -> NewRequest:
    return NewRequest(key, computed, tuple(blocks), window, resumed)


def step(scheduled: dict[str, int], *, new: tuple[NewRequest, ...] = (), starts: dict[str, int] | None = None,
         blocks: dict[str, tuple[int, ...]] | None = None, order: tuple[str, ...] | None = None) -> Step:  # fmt: skip
    return Step(new, starts or {}, blocks or {}, scheduled, order or tuple(scheduled))


def book() -> RowBook:
    return RowBook(block_size=BLOCK, num_slots=64 * BLOCK)


def test_rows_follow_the_order_of_the_batch() -> None:
    rows = book()
    plan = rows.plan(step({"a": 3, "b": 2}, new=(new("a", 0, [1]), new("b", 0, [2])), order=("b", "a")))
    assert [(s.key, s.start, s.length, s.offset) for s in plan.spans] == [("b", 0, 2, 0), ("a", 0, 3, 2)]
    assert plan.indices is None
    assert rows.find_rows("a", 3).tolist() == [2, 3, 4]
    assert rows.find_rows("b", 2).tolist() == [0, 1]


def test_a_cached_prefix_refers_to_the_rows_that_filled_its_blocks() -> None:
    rows = book()
    rows.plan(step({"a": 8}, new=(new("a", 0, [5, 6]),)))
    plan = rows.plan(step({"b": 2}, new=(new("b", 8, [5, 6, 7]),)))
    assert plan.first_row == 8
    assert rows.find_rows("b", 10).tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]


def test_a_prefix_filled_in_the_very_same_step_is_found() -> None:
    """vLLM marks blocks as cached when it schedules them, so a neighbour in the batch may hit them at once."""
    rows = book()
    both = (new("a", 0, [1, 2]), new("b", 4, [1, 3]))
    rows.plan(step({"a": 6, "b": 2}, new=both))
    assert rows.find_rows("b", 6).tolist() == [0, 1, 2, 3, 6, 7]


def test_blocks_filled_by_an_uncaptured_request_make_holes() -> None:
    rows = book()
    rows.plan(step({"a": 4}, new=(new("a", 0, [1]),)))
    rows.plan(step({"off": 4}, new=(new("off", 0, [1], NOTHING),)))
    rows.plan(step({"b": 1}, new=(new("b", 4, [1, 2]),)))
    assert rows.find_rows("b", 5).tolist() == [MISSING] * 4 + [4]


def test_preemption_recomputes_and_the_last_write_wins() -> None:
    """CASES 5: prefill 20 of 40, pre-empt, resume from 0, finish, 3 decode steps: each position once."""
    rows = book()
    rows.plan(step({"a": 20}, new=(new("a", 0, [1, 2, 3, 4, 5]),)))
    blocks = list(range(10, 20))
    rows.plan(step({"a": 40}, new=(new("a", 0, blocks, resumed=True),)))
    for position in (40, 41, 42):
        rows.plan(step({"a": 1}, starts={"a": position}, blocks={"a": (20,) if position == 40 else ()}))
    assert rows.find_rows("a", 43).tolist() == list(range(20, 63))


def test_rejected_draft_tokens_are_overwritten() -> None:
    rows = book()
    rows.plan(step({"a": 4}, new=(new("a", 0, [1, 2, 3]),)))
    rows.plan(step({"a": 4}, starts={"a": 4}))  # one token and three drafts, of which none is accepted
    rows.plan(step({"a": 4}, starts={"a": 5}))
    assert rows.find_rows("a", 6).tolist() == [0, 1, 2, 3, 4, 8]


def test_behind_its_window_no_row_of_a_request_is_written() -> None:
    rows = book()
    rows.plan(step({"a": 3}, new=(new("a", 0, [1], Window(0, 3)),)))
    assert rows.plan(step({"a": 1}, starts={"a": 3})).count == 0
    assert rows.find_rows("a", 4).tolist() == [0, 1, 2]


def test_a_window_in_the_middle_is_taken_out_of_the_buffer() -> None:
    """Of 9 and 6 computed rows, positions 2 .. 5 of the one and 4 of the other."""
    rows = book()
    both = (new("a", 0, [1, 2, 3], Window(2, 5)), new("b", 0, [4, 5], Window(4, 5)))
    plan = rows.plan(step({"a": 9, "b": 6}, new=both, order=("b", "a")))
    assert plan.indices is not None
    assert plan.indices.tolist() == [4, 8, 9, 10]
    assert [(s.key, s.start, s.length, s.offset) for s in plan.spans] == [("b", 4, 1, 0), ("a", 2, 3, 1)]
    assert [plan.find_position(row) for row in range(4)] == [("b", 4), ("a", 2), ("a", 3), ("a", 4)]
    assert rows.find_rows("a", 9).tolist() == [1, 2, 3]
    assert rows.find_rows("a", 4).tolist() == [1, 2]
    assert rows.find_rows("a", 2).tolist() == []
    assert (rows.count_positions("a"), rows.count_positions("b")) == (5, 5)


def test_a_window_is_cut_by_steps_and_nothing_around_it_is_written() -> None:
    rows = book()
    assert rows.plan(step({"a": 4}, new=(new("a", 0, [1, 2, 3], Window(6, 9)),))).count == 0
    assert rows.plan(step({"a": 3}, starts={"a": 4})).count == 1
    assert rows.plan(step({"a": 1}, starts={"a": 7})).count == 1
    assert rows.plan(step({"a": 3}, starts={"a": 8})).count == 1
    assert rows.plan(step({"a": 1}, starts={"a": 11})).count == 0
    assert rows.find_rows("a", 12).tolist() == [0, 1, 2]


def test_a_window_takes_its_rows_from_the_cached_prefix() -> None:
    """All of them, none of its own: 2 .. 5 of a prefix of 8."""
    rows = book()
    rows.plan(step({"a": 8}, new=(new("a", 0, [5, 6]),)))
    plan = rows.plan(step({"b": 2}, new=(new("b", 8, [5, 6, 7], Window(2, 5)),)))
    assert plan.count == 0
    assert rows.find_rows("b", 10).tolist() == [2, 3, 4]
    rows.plan(step({"c": 2}, new=(new("c", 8, [5, 6, 8], Window(7, END)),)))
    assert rows.find_rows("c", 10).tolist() == [7, 8, 9]


def test_rows_outside_of_a_window_are_missing_where_the_next_one_looks_for_them() -> None:
    """Block 1 held rows of `a`; `w` fills it again and keeps positions 1 and 2 only."""
    rows = book()
    rows.plan(step({"a": 4}, new=(new("a", 0, [1]),)))
    rows.plan(step({"w": 4}, new=(new("w", 0, [1], Window(1, 3)),)))
    rows.plan(step({"b": 1}, new=(new("b", 4, [1, 2]),)))
    assert rows.find_rows("b", 5).tolist() == [MISSING, 4, 5, MISSING, 6]


def test_a_window_far_into_a_request_takes_no_room_for_what_is_before_it() -> None:
    rows = RowBook(block_size=BLOCK, num_slots=0)
    rows.plan(step({"a": 1}, new=(new("a", 10**9, [], Window(10**9, END)),)))
    assert rows.find_rows("a", 10**9 + 1).tolist() == [0]


def test_uncaptured_rows_are_left_out_by_index() -> None:
    rows = book()
    both = (new("off", 0, [1], NOTHING), new("a", 0, [2]))
    plan = rows.plan(step({"off": 2, "a": 3}, new=both))
    assert plan.indices is not None
    assert plan.indices.tolist() == [2, 3, 4]
    assert plan.count == 3


def test_a_place_that_is_used_again_has_no_row_of_before() -> None:
    rows = book()
    rows.plan(step({"a": 4}, new=(new("a", 0, [1]),)))
    rows.forget("a")
    rows.plan(step({"b": 1}, new=(new("b", 8, [8, 9, 10]),)))
    assert rows.find_rows("b", 9).tolist() == [MISSING] * 8 + [4]


def test_requests_that_come_again_in_the_same_order_are_new_ones() -> None:
    rows = book()
    announced = (new("a", 0, [1]), new("b", 0, [2]))
    for first_row in (0, 4):
        rows.plan(step({"a": 2, "b": 2}, new=announced))
        assert rows.find_rows("a", 2).tolist() == [first_row, first_row + 1]
        assert rows.find_rows("b", 2).tolist() == [first_row + 2, first_row + 3]
        rows.forget("a")
        rows.forget("b")
    with pytest.raises(RowError, match="'a', which no step announced"):
        rows.plan(step({"a": 1, "b": 1}, starts={"a": 2, "b": 2}))


def test_rows_of_before_a_second_preemption_are_found_where_the_cache_knows_none() -> None:
    """Computed to 6, recomputed to 2, and then on from 4: a block that another one filled, who is not captured."""
    rows = book()
    rows.plan(step({"a": 6}, new=(new("a", 0, [1, 2]),)))
    rows.plan(step({"a": 2}, new=(new("a", 0, [3, 4], resumed=True),)))
    rows.plan(step({"a": 1}, new=(new("a", 4, [5, 6], resumed=True),)))
    assert rows.find_rows("a", 6).tolist() == [6, 7, 2, 3, 8, 5]


def test_long_requests_and_many_of_them() -> None:
    """More positions than a page of NumberLists, more requests than it begins with."""
    keys = [f"r{number}" for number in range(90)]
    rows = RowBook(block_size=BLOCK, num_slots=90 * 200 * BLOCK)
    announced = tuple(new(key, 0, list(range(200 * n, 200 * n + 200))) for n, key in enumerate(keys))
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
    rows = book()
    announced = (new("a", 0, [1]), new("off", 0, [2], NOTHING), new("b", 0, [3]))
    plan = rows.plan(step({"a": 2, "off": 3, "b": 3}, new=announced))
    assert [plan.find_position(row) for row in range(5)] == [("a", 0), ("a", 1), ("b", 0), ("b", 1), ("b", 2)]


def test_chunks_live_as_long_as_a_request_or_a_slot_refers_to_them() -> None:
    rows = book()
    rows.plan(step({"a": 4}, new=(new("a", 0, [1]),)))  # rows 0 .. 3
    rows.plan(step({"b": 8}, new=(new("b", 0, [2, 3]),)))  # 4 .. 11
    assert rows.find_live_chunks(2) == {0, 1, 2, 3, 4, 5, 6}
    rows.forget("a")
    assert rows.find_live_chunks(2) >= {0, 1}, "a later request may hit block 1"
    rows.plan(step({"c": 4}, new=(new("c", 0, [1]),)))  # 12 .. 15
    assert rows.find_live_chunks(2) == {2, 3, 4, 5, 6, 7, 8}
    rows.plan(step({"d": 8}, new=(new("d", 0, [2, 3]),)))  # 16 .. 23, over b's slots
    assert rows.find_live_chunks(2) >= {2, 3, 4, 5}, "b lives"
    rows.forget("b")
    assert rows.find_live_chunks(2) == {6, 7, 8, 9, 10, 11, 12}


def test_requests_without_any_row_are_asked_like_others() -> None:
    rows, keys = book(), [f"off{number}" for number in range(40)]
    announced = tuple(new(key, 0, [number], NOTHING) for number, key in enumerate(keys))
    rows.plan(step(dict.fromkeys(keys, 1), new=announced))
    assert rows.find_rows("off39", 1).tolist() == []
    assert rows.count_positions("off39") == 0
    assert rows.find_live_chunks(4) == {0}


def test_a_batch_that_the_step_does_not_schedule_is_an_error() -> None:
    rows = book()
    rows.plan(step({"a": 1}, new=(new("a", 0, [1]),)))
    with pytest.raises(RowError, match="batch holds request 'a' and the step does not schedule it"):
        rows.plan(Step((), {"b": 1}, {}, {"b": 1}, ("a",)))


def test_an_unannounced_request_is_an_error() -> None:
    with pytest.raises(RowError, match="'ghost', which no step announced"):
        book().plan(step({"ghost": 1}, starts={"ghost": 0}))


def test_a_block_copied_before_the_step_takes_its_rows_along() -> None:
    rows = book()
    rows.plan(step({"a": 4}, new=(new("a", 0, [1]),)))
    copied = Step((new("b", 3, [9]),), {}, {}, {"b": 1}, ("b",), copies=((1, 9),))
    rows.plan(copied)
    assert rows.find_rows("b", 4).tolist() == [0, 1, 2, 4]
