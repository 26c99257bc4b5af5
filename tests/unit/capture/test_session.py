"""What a session does around a step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_overlay.capture import session as session_module
from vllm_overlay.capture.finished import FinishedRequest
from vllm_overlay.capture.rows import WHOLE, NewRequest, RowBook, Step
from vllm_overlay.capture.session import CaptureSession


@pytest.mark.parametrize(("tokens", "poisoned"), [(3, 1), (0, 0)])
def test_the_buffer_is_poisoned_before_a_step_that_computes(tokens: int, poisoned: int) -> None:
    """CASES 9: without it, a tap that does not fire would leave the last step's rows to be stored."""
    calls: list[str] = []
    session: Any = CaptureSession.__new__(CaptureSession)
    session._taps = SimpleNamespace(poison=lambda: calls.append("poison"))
    session.prepare_step(SimpleNamespace(total_num_scheduled_tokens=tokens))
    assert len(calls) == poisoned


def test_a_signal_while_the_last_records_are_written_loses_none() -> None:
    """vLLM's handler of SIGTERM raises SystemExit in whatever line the process is."""
    written: list[str] = []
    session: Any = CaptureSession.__new__(CaptureSession)
    session._taps = None
    session._warn_of_incomplete = lambda: None
    session._recorder = SimpleNamespace(close=lambda: written.append("closed"))

    def finish(key: str, fact: FinishedRequest) -> None:
        if key == "b" and written == ["a"]:
            written.append("interrupted")
            raise SystemExit
        if key not in written:
            written.append(key)

    session._finish = finish
    with pytest.raises(SystemExit):
        session.close(iter([("a", 3, "stop", 1), ("b", 4, "stop", 2), ("c", 5, "length", 3)]))
    assert written == ["a", "interrupted", "b", "c", "closed"]


def test_a_step_is_taken_apart_by_what_each_request_is() -> None:
    """`b` was pre-empted and comes back: its blocks are new ones, those of `c` are more."""
    session: Any = CaptureSession.__new__(CaptureSession)
    session._kv_group = 1
    session._book = RowBook(block_size=4, num_slots=0)
    session._seam = SimpleNamespace(
        resumed_requests=lambda cached: {"b", "elsewhere"},
        step_order=lambda worker: ("c", "a", "b"),
        block_copies=lambda scheduler_output: [(1, 2)],
    )
    cached = SimpleNamespace(
        req_ids=["a", "b", "c"], num_computed_tokens=[7, 4, 16], new_block_ids=[None, ([1], [5, 6]), ([2], [9])]
    )
    scheduled = {"a": 1, "b": 3, "c": 1}
    step = session._read_step(
        None, SimpleNamespace(scheduled_cached_reqs=cached, scheduled_new_reqs=[], num_scheduled_tokens=scheduled)
    )
    resumed = NewRequest("b", 4, (5, 6), resumed=True)
    assert step == Step((resumed,), {"a": 7, "c": 16}, {"c": (9,)}, scheduled, ("c", "a", "b"), [(1, 2)])


def test_tokens_that_nothing_refers_to_are_dropped_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 4 rows: a first look at 2 chunks, the next ones when there may be twice as many as were kept."""
    monkeypatch.setattr(session_module, "CHUNK_ROWS", 4)
    monkeypatch.setattr(session_module, "FEWEST_CHUNKS", 2)
    kept: list[tuple[int, set[int]]] = []
    session: Any = CaptureSession.__new__(CaptureSession)
    session._look_at_row = 8
    book = RowBook(block_size=4, num_slots=4 * 4)
    session._recorder = SimpleNamespace(keep_tokens=lambda chunks: kept.append((book.num_rows, chunks)))
    for number in range(10):
        key = str(number)
        book.plan(Step((NewRequest(key, 0, (number % 3,), WHOLE),), {}, {}, {key: 4}, (key,)))
        session._drop_old_tokens(book)
        book.forget(key)
    assert kept == [(8, {0, 1, 2}), (20, {2, 3, 4, 5}), (36, {6, 7, 8, 9})]
