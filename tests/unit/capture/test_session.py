"""What a session does around a step."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_overlay.capture import session as session_module
from vllm_overlay.capture.finished import FinishedRequest
from vllm_overlay.capture.recorder import Recorder
from vllm_overlay.capture.rows import WHOLE, NewRequest, RowBook, Step
from vllm_overlay.capture.session import CaptureSession
from vllm_overlay.store import Store, StoreWriter, summarize

REPOSITORY = Path(__file__).parents[3]


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


def test_what_a_request_asks_for_becomes_its_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From sampling parameters to the store: the second and third find a prefix of the first in the cache."""
    monkeypatch.syspath_prepend(REPOSITORY / "tools")
    step_cost = importlib.import_module("step_cost")
    recorder = Recorder(StoreWriter.open(tmp_path / "store", step_cost.META), step_cost.META.layer_ids)
    session: Any = step_cost.PlayedSession(recorder, 4, 64, 16, "prompt")
    keys = session._seam.step_order(None)
    asked = ({"tokens": "all"}, {"tokens": [4, 18]}, {}, {"capture": False, "tokens": [0, 3]})
    computed = (0, 16, 16, 0)
    new = [
        SimpleNamespace(
            req_id=key,
            prompt_token_ids=[step_cost.TOKEN] * 20,
            mm_features=[],
            sampling_params=SimpleNamespace(extra_args={"overlay": overlay}),
            num_computed_tokens=start,
            block_ids=([0 if start else 2 * number, 2 * number + 1],),
        )
        for number, (key, overlay, start) in enumerate(zip(keys, asked, computed, strict=True))
    ]
    nothing = SimpleNamespace(req_ids=[], num_computed_tokens=[], new_block_ids=[])
    session.record_step(
        None,
        step_cost.scheduler_output(new, nothing, {key: 20 - start for key, start in zip(keys, computed, strict=True)}),
    )
    cached = SimpleNamespace(req_ids=list(keys), num_computed_tokens=[20] * 4, new_block_ids=[None] * 4)
    session.record_step(None, step_cost.scheduler_output([], cached, dict.fromkeys(keys, 1)))
    session.close([(key, 22, "length", number + 1) for number, key in enumerate(keys)])
    with Store.open(tmp_path / "store") as store:
        found = [(record.first_position, len(record.token_ids), record.num_prompt_tokens) for record in store]
        assert found == [(0, 21, 20), (4, 14, 14), (0, 20, 20)]
        assert all(record.complete for record in store)
        # 20 and 1 of the first, 2 of the second behind its prefix, 4 of the third.
        assert summarize(store).rows_stored == 21 + 2 + 4
