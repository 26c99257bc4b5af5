"""Host memory for rows: given out and back in order, never twice at once, and full means wait."""

from __future__ import annotations

import threading
from collections import deque

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_overlay.capture import transfer
from vllm_overlay.capture.transfer import (
    CudaPackedRows,
    HostRows,
    Ring,
    find_peaks,
    join_rows,
    open_transfer,
    split_facts,
)
from vllm_overlay.store import pack_rows


@given(st.lists(st.one_of(st.integers(1, 7), st.none()), max_size=60))
def test_places_in_use_never_overlap(moves: list[int | None]) -> None:
    """A number takes so many places, None gives the oldest back."""
    ring, in_use = Ring(10), deque[tuple[int, int]]()
    for count in moves:
        if count is None:
            if in_use:
                in_use.popleft()
                ring.give_back()
            continue
        if ring._find(count) is None:
            continue
        start = ring.take(count)
        assert start >= 0
        assert start + count <= 10
        assert all(start + count <= first or last <= start for first, last in in_use)
        in_use.append((start, start + count))


def test_an_empty_ring_takes_what_it_holds() -> None:
    ring = Ring(8)
    assert ring.take(8) == 0
    ring.give_back()
    assert ring.take(8) == 0


def test_a_full_ring_makes_the_step_wait_and_counts_it() -> None:
    ring = Ring(8)
    ring.take(6)
    timer = threading.Timer(0.05, ring.give_back)
    timer.start()
    assert ring.take(4) == 0
    assert ring.num_waits == 1
    timer.join()


def test_on_a_cpu_the_limit_holds_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "HOST_BYTES", 0)
    buffer = torch.arange(24.0).reshape(3, 2, 4)
    sender = open_transfer(buffer, "auto")
    tokens = torch.tensor([7, 8, 9], dtype=torch.int32)
    first = sender.send(3, None, tokens).wait()
    second = sender.send(2, torch.tensor([2, 0]).numpy(), tokens).wait()
    buffer.zero_()
    assert first.rows.equal(torch.arange(24.0).reshape(3, 2, 4))
    assert second.tokens.tolist() == [9, 7]
    assert second.peaks[0].tolist() == [19.0, 23.0]
    timer = threading.Timer(0.05, first.release)
    timer.start()
    sender.send(3, None, tokens)
    assert sender.num_waits == 1
    timer.join()


def test_rows_in_8_bits_are_packed_on_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """The peaks are those of the rows themselves, and the room is counted in the bytes that they take: 24 a row."""
    monkeypatch.setattr(transfer, "HOST_BYTES", 12 * 24)
    buffer = torch.randn(4, 2, 8)
    wanted, peaks = pack_rows(buffer), find_peaks(buffer)
    sender, tokens = open_transfer(buffer, "fp8"), torch.arange(4, dtype=torch.int32)
    first = sender.send(4, None, tokens).wait()
    second = sender.send(2, torch.tensor([2, 0]).numpy(), tokens).wait()
    third = sender.send(2, None, tokens).wait()
    timer = threading.Timer(5, first.release)
    timer.start()
    sender.send(4, None, tokens)
    timer.cancel()
    assert sender.num_waits == 0
    buffer.zero_()
    for host, rows in ((first, [0, 1, 2, 3]), (second, [2, 0]), (third, [0, 1])):
        assert host.rows.equal(wanted[rows])
        assert host.peaks.tolist() == peaks[rows].tolist()


def test_on_a_device_the_memory_for_packed_rows_is_used_again() -> None:
    rows = torch.randn(5, 2, 8).bfloat16()
    form = CudaPackedRows(torch.empty_like(rows))
    first = form.make(rows[:2], find_peaks(rows[:2]))
    assert first.equal(pack_rows(rows[:2])) and (form.shape, form.dtype) == ((2, 12), torch.uint8)
    assert form.make(rows, find_peaks(rows)).equal(pack_rows(rows))
    assert first.equal(pack_rows(rows)[:2])


def test_tokens_and_peaks_share_one_piece_of_memory() -> None:
    """What a GPU writes is read on the host, where only the bytes arrive."""
    rows, facts = torch.randn(5, 3, 4).to(torch.bfloat16), torch.zeros(5 * 4, dtype=torch.int32)
    tokens, peaks = split_facts(facts, 3)
    tokens.copy_(torch.arange(5))
    torch.linalg.vector_norm(rows, ord=float("inf"), dim=-1, dtype=torch.float32, out=peaks)
    arrived = facts.clone()
    tokens, peaks = split_facts(arrived, 3)
    assert tokens.tolist() == [0, 1, 2, 3, 4]
    assert peaks.equal(find_peaks(rows)) and peaks.equal(rows.float().abs().amax(-1))


@pytest.mark.parametrize(("starts", "copied"), [([0, 2, 5], False), ([0, 3, 5], True), ([4, 0, 2], True)])
def test_rows_of_steps_are_joined_without_a_copy_where_they_lie_behind_each_other(
    starts: list[int], copied: bool
) -> None:
    memory = torch.arange(8 * 6.0).reshape(8, 2, 3)
    steps = [
        HostRows(
            memory[start : start + 2],
            np.array([start, start], dtype=np.int32),
            np.full((2, 2), start, dtype=np.float32),
            lambda: None,
        )
        for start in starts[:2]
    ]
    last = starts[2]
    joined = join_rows([*steps, HostRows(memory[last - 1 : last], np.zeros(1), np.zeros((1, 2)), lambda: None)])
    assert joined.rows.equal(torch.cat([memory[starts[0] :][:2], memory[starts[1] :][:2], memory[last - 1 :][:1]]))
    assert (joined.rows.data_ptr() != memory[starts[0] :].data_ptr()) == copied
    assert joined.tokens.tolist() == [starts[0]] * 2 + [starts[1]] * 2 + [0]
    assert joined.peaks.shape == (5, 2)


def test_rows_of_different_memories_are_copied() -> None:
    parts = [
        HostRows(torch.full((1, 2, 3), value), np.zeros(1), np.zeros((1, 2)), lambda: None) for value in (1.0, 2.0)
    ]
    assert join_rows(parts).rows[:, 0, 0].tolist() == [1.0, 2.0]
