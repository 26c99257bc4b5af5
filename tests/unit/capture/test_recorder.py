"""The writer thread: what it refuses, and that its errors reach the caller."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from vllm_overlay.capture.recorder import CaptureError, Recorder, RequestFacts
from vllm_overlay.capture.rows import Plan
from vllm_overlay.capture.transfer import Arrival, HostRows, open_transfer
from vllm_overlay.store import Store, StoreMeta, StoreWriter, pack_rows
from vllm_overlay.store.float8 import unpack_rows

META = StoreMeta((1, 2), 4, "float32", 2, "toy", "f" * 64, "0.16.0", "V1")


@pytest.fixture
def recorder(tmp_path: Path) -> Recorder:
    return Recorder(StoreWriter.open(tmp_path / "store", META), META.layer_ids)


def plan_one(start: int, length: int, first_row: int) -> Plan:
    return Plan(None, length, first_row, ("key",), np.array([start]), np.array([length]))


def send(
    recorder: Recorder,
    buffer: torch.Tensor,
    tokens: list[int],
    start: int = 0,
    first_row: int = 0,
    dtype: str = "auto",
) -> None:
    plan = plan_one(start, len(tokens), first_row)
    transfer = open_transfer(buffer, dtype)
    recorder.write(plan, transfer.send(len(tokens), None, torch.tensor(tokens, dtype=torch.int32)))


def begin(recorder: Recorder, prompt: list[int]) -> None:
    recorder.begin("key", RequestFacts("r", np.array(prompt), "tag", ((1, 3),)))


def test_a_record_has_prompt_and_generated_tokens_and_its_mask(recorder: Recorder, tmp_path: Path) -> None:
    rows = torch.randn(4, 2, 4)
    begin(recorder, [7, 8])
    send(recorder, rows[:2].clone(), [7, 8])
    send(recorder, rows[2:].clone(), [9, 5], start=2, first_row=2)
    recorder.finish("key", np.arange(3), "stop")
    recorder.close()
    with Store.open(tmp_path / "store") as store:
        record = store["r"]
        assert record.token_ids.tolist() == [7, 8, 9]
        assert record.hidden_states.equal(rows[:3])
        assert record.loss_mask is not None
        assert record.loss_mask.tolist() == [False, True, True]
        assert (record.num_prompt_tokens, record.tag, record.finish_reason) == (2, "tag", "stop")


@pytest.mark.parametrize(
    ("first", "tokens", "num_prompt_tokens", "mask"),
    [
        (1, [8], 1, [True]),
        (1, [8, 9, 5], 1, [True, True, False]),
        (2, [9, 5], 0, [True, False]),
        (3, [5], 0, [False]),
    ],
)
def test_a_windows_record_is_of_its_own_positions(
    recorder: Recorder, tmp_path: Path, first: int, tokens: list[int], num_prompt_tokens: int, mask: list[bool]
) -> None:
    """Of a prompt 7, 8 and what was generated behind it; positions 1 and 2 are under the loss."""
    rows = torch.randn(len(tokens), 2, 4)
    recorder.begin("key", RequestFacts("r", np.array([7, 8]), None, ((1, 3),), first_position=first))
    send(recorder, rows.clone(), tokens, start=first)
    recorder.finish("key", np.arange(len(tokens)), "stop")
    recorder.close()
    with Store.open(tmp_path / "store") as store:
        record = store["r"]
        assert record.first_position == first
        assert record.token_ids.tolist() == tokens
        assert record.hidden_states.equal(rows)
        assert record.num_prompt_tokens == num_prompt_tokens
        assert record.loss_mask is not None and record.loss_mask.tolist() == mask
        assert record.complete


def test_a_token_in_a_window_that_is_not_the_prompts_is_refused(recorder: Recorder) -> None:
    """9 is the prompt's token at position 0 of the record, and not at position 2 of the prompt."""
    recorder.begin("key", RequestFacts("r", np.array([9, 7, 8]), None, None, first_position=2))
    send(recorder, torch.randn(1, 2, 4), [9], start=2)
    recorder.finish("key", np.arange(1), "stop")
    with pytest.raises(CaptureError, match="'r', position 2: expected the prompt's token 8, found 9"):
        recorder.flush()


def test_rows_of_small_steps_are_written_together(recorder: Recorder, tmp_path: Path, monkeypatch: Any) -> None:
    """Each step's own write would take the interpreter's lock from the thread that runs the model."""
    appended, append = [], recorder._writer.append
    monkeypatch.setattr(recorder._writer, "append", lambda rows: appended.append(len(rows)) or append(rows))
    monkeypatch.setattr("vllm_overlay.capture.recorder.TAKE_UP_INTERVAL_S", 60.0)
    time.sleep(0.2)  # the thread has begun its first wait of that length
    rows = torch.randn(5, 2, 4)
    begin(recorder, [7, 8, 9, 4, 5])
    for position in range(5):
        send(recorder, rows[position : position + 1].clone(), [[7, 8, 9, 4, 5][position]], position, position)
    recorder.finish("key", np.arange(5), "stop")
    assert appended == []
    recorder.close()
    assert appended == [5]
    with Store.open(tmp_path / "store") as store:
        assert store["r"].hidden_states.equal(rows)


def test_rows_wait_until_there_are_many(recorder: Recorder, monkeypatch: Any) -> None:
    monkeypatch.setattr("vllm_overlay.capture.recorder.TAKE_UP_INTERVAL_S", 60.0)
    monkeypatch.setattr("vllm_overlay.capture.recorder.ROWS_AT_ONCE", 3)
    time.sleep(0.2)
    begin(recorder, [1] * 5)
    send(recorder, torch.randn(2, 2, 4), [1, 1])
    time.sleep(0.2)
    assert recorder.statistics.num_rows == 0
    send(recorder, torch.randn(1, 2, 4), [1], start=2, first_row=2)
    deadline = time.monotonic() + 20
    while recorder.statistics.num_rows < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert recorder.statistics.num_rows == 3
    recorder.close()


def test_rows_that_are_here_do_not_wait_for_those_that_are_not(recorder: Recorder) -> None:
    """A step that the device still computes must not hold the room of the steps before it."""
    written_before = []
    tokens = torch.tensor([1], dtype=torch.int32)
    first = open_transfer(torch.randn(1, 2, 4), "auto").send(1, None, tokens)
    second = open_transfer(torch.randn(1, 2, 4), "auto").send(1, None, tokens)

    def wait() -> HostRows:
        written_before.append(recorder.statistics.num_rows)
        return second.wait()

    begin(recorder, [1, 1])
    recorder.write(plan_one(0, 1, 0), first)
    recorder.write(plan_one(1, 1, 1), Arrival(wait, lambda: False))
    recorder.close()
    assert written_before == [1]
    assert recorder.statistics.num_rows == 2


def test_no_more_rows_are_held_for_one_write_than_a_big_step_has(recorder: Recorder, monkeypatch: Any) -> None:
    """Their memory is given back when they are written: with a backlog of all that fits, steps would wait for that."""
    monkeypatch.setattr("vllm_overlay.capture.recorder.ROWS_AT_ONCE", 4)
    monkeypatch.setattr("vllm_overlay.capture.recorder.TAKE_UP_INTERVAL_S", 60.0)
    time.sleep(0.2)
    appended, append = [], recorder._writer.append
    monkeypatch.setattr(recorder._writer, "append", lambda rows: appended.append(len(rows)) or append(rows))
    begin(recorder, [1] * 9)
    for first in (0, 3, 6):
        send(recorder, torch.randn(3, 2, 4), [1] * 3, start=first, first_row=first)
    recorder.close()
    assert appended == [6, 3]


def test_the_room_of_rows_that_could_not_be_joined_is_given_back(recorder: Recorder, monkeypatch: Any) -> None:
    """A step that waits for it would never come to the call that raises."""

    def fail(_: object) -> None:
        raise MemoryError("no room for a copy")

    monkeypatch.setattr("vllm_overlay.capture.recorder.join_rows", fail)
    released: list[int] = []
    begin(recorder, [1, 1])
    for position in range(2):
        rows = HostRows(torch.randn(1, 2, 4), np.array([1]), np.ones((1, 2)), lambda at=position: released.append(at))
        recorder.write(plan_one(position, 1, position), Arrival(lambda rows=rows: rows, lambda: True))
    with pytest.raises(CaptureError, match="no room for a copy"):
        recorder.flush()
    assert released == [0, 1]


def test_the_room_is_given_back_where_a_later_step_of_a_write_does_not_arrive(recorder: Recorder) -> None:
    released: list[int] = []

    def fail() -> HostRows:
        raise RuntimeError("the device is gone")

    rows = HostRows(torch.randn(1, 2, 4), np.array([1]), np.ones((1, 2)), lambda: released.append(0))
    begin(recorder, [1, 1])
    recorder.write(plan_one(0, 1, 0), Arrival(lambda: rows, lambda: True))
    recorder.write(plan_one(1, 1, 1), Arrival(fail, lambda: True))
    with pytest.raises(CaptureError, match="the device is gone"):
        recorder.close()
    assert released == [0]


@pytest.mark.parametrize(("reason", "said"), [("stop", 1), ("abort", 0)])
def test_a_request_that_ends_before_its_window_has_no_record(
    recorder: Recorder, tmp_path: Path, reason: str, said: int, caplog: pytest.LogCaptureFixture
) -> None:
    recorder.begin("key", RequestFacts("r", np.array([7, 8]), None, None, first_position=50))
    recorder.finish("key", np.arange(0), reason)
    recorder.close()
    assert caplog.messages == ["request 'r' ended before position 50, where its window begins: it has no record"] * said
    assert recorder.statistics.num_records == 0
    with Store.open(tmp_path / "store") as store:
        assert len(store) == 0


def test_a_close_that_a_signal_interrupted_is_finished_by_the_next(
    recorder: Recorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was ready is committed with no flush before: the signal may come in any line."""
    begin(recorder, [7, 8])
    send(recorder, torch.randn(2, 2, 4), [7, 8])
    recorder.finish("key", np.arange(2), "stop")
    with monkeypatch.context() as patch:
        patch.setattr(recorder._thread, "join", lambda: sys.exit(0))
        with pytest.raises(SystemExit):
            recorder.close()
    recorder.close()
    recorder.close()
    with Store.open(tmp_path / "store") as store:
        assert [record.request_id for record in store] == ["r"]


@pytest.mark.parametrize(
    ("value", "word"), [(0.0, "all zero"), (float("nan"), "not finite"), (float("inf"), "not finite")]
)
def test_a_dead_row_is_refused_with_request_position_and_layer(recorder: Recorder, value: float, word: str) -> None:
    """CASES 9, 10: a tap that did not fire, an all-zero or non-finite row; never an empty or silent store."""
    rows = torch.randn(3, 2, 4)
    rows[2, 1] = value
    begin(recorder, [1, 2, 3])
    send(recorder, rows, [1, 2, 3])
    with pytest.raises(CaptureError, match=f"request 'r', position 2, layer 2: the row is {word}"):
        recorder.flush()


def test_a_token_that_is_not_the_prompts_is_refused(recorder: Recorder) -> None:
    begin(recorder, [1, 2, 3])
    send(recorder, torch.randn(3, 2, 4), [1, 3, 2])
    recorder.finish("key", np.arange(3), "stop")
    with pytest.raises(CaptureError, match="'r', position 1: expected the prompt's token 2, found 3"):
        recorder.flush()


def test_a_row_of_another_request_is_refused_if_its_token_is_another(recorder: Recorder) -> None:
    """A prefix that was found in the cache: rows 0 and 1 were computed for a first request."""
    recorder.begin("first", RequestFacts("a", np.array([7, 8]), None, None))
    begin(recorder, [7, 9, 5])
    send(recorder, torch.randn(3, 2, 4), [7, 8, 5])
    recorder.finish("first", np.array([0, 1]), "stop")
    recorder.finish("key", np.array([0, 1, 2]), "stop")
    with pytest.raises(CaptureError, match="'r', position 1: expected the prompt's token 9, found 8"):
        recorder.flush()


def test_where_the_prompt_has_no_token_none_is_recorded_and_none_refused(recorder: Recorder, tmp_path: Path) -> None:
    """An image's places are -1; what the runner puts there is no token of the prompt."""
    begin(recorder, [-1, 4, 5])
    send(recorder, torch.randn(3, 2, 4), [99, 5, 6], first_row=0)
    recorder.finish("key", np.array([0, -1, 1, 2]), "stop")
    recorder.close()
    with Store.open(tmp_path / "store") as store:
        assert store["r"].token_ids.tolist() == [-1, 4, 5, 6]


def test_a_write_error_reaches_the_next_call(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    """CASES 19: the disk fills in the middle of a run: an error with the path, and no record."""

    def full(*args: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.pwrite", full)
    begin(recorder, [1])
    send(recorder, torch.randn(1, 2, 4), [1])
    with pytest.raises(CaptureError, match=r"capture stopped: .*0001-00000\.safetensors.*No space left on device"):
        recorder.flush()


def test_a_step_that_waits_for_room_goes_on_when_writing_fails(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CASES 19: the writer gives the room of what it can no longer write back, and the step's next call raises."""
    monkeypatch.setattr("vllm_overlay.capture.transfer.HOST_BYTES", 0)

    def full(*args: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.pwrite", full)
    buffer, tokens = torch.randn(1, 2, 4), torch.tensor([1], dtype=torch.int32)
    transfer = open_transfer(buffer, "auto")  # room for two steps
    begin(recorder, [1] * 9)
    with pytest.raises(CaptureError, match="No space left on device"):
        for position in range(9):
            recorder.write(plan_one(position, 1, position), transfer.send(1, None, tokens))
            time.sleep(0.02)


def test_a_hole_is_saved_as_incomplete_and_counted(recorder: Recorder, tmp_path: Path) -> None:
    begin(recorder, [1, 2])
    send(recorder, torch.randn(1, 2, 4), [2], start=1)
    recorder.finish("key", np.array([-1, 0]), "length")
    recorder.close()
    assert recorder.statistics.num_incomplete == 1
    with Store.open(tmp_path / "store") as store:
        assert not store["r"].complete


def test_rows_in_8_bits_are_looked_at_before_they_are_packed(tmp_path: Path) -> None:
    """A row that is all zero, or not finite, is refused as any other; the others are as e4m3 has them."""
    meta = replace(META, dtype="float8_e4m3fn")
    recorder = Recorder(StoreWriter.open(tmp_path / "store", meta), meta.layer_ids)
    rows = torch.randn(3, 2, 4)
    begin(recorder, [7, 8, 9])
    send(recorder, rows.clone(), [7, 8, 9], dtype="fp8")
    recorder.finish("key", np.arange(3), "stop")
    recorder.flush()
    assert recorder.statistics.num_bytes == 3 * 2 * (4 + 4)
    with Store.open(tmp_path / "store") as store:
        assert store["r"].hidden_states.equal(unpack_rows(pack_rows(rows)))
    rows[1, 1] = 0
    begin(recorder, [7, 8, 9])
    send(recorder, rows, [7, 8, 9], first_row=3, dtype="fp8")
    with pytest.raises(CaptureError, match="'r', position 1, layer 2: the row is all zero"):
        recorder.close()
