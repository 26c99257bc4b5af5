"""The way of a step's rows from the tapped buffer to host memory, out of the way of the next step.

On CUDA the rows go device-to-device into one of two staging buffers on the step's own stream (microseconds), and from
there to pinned memory on a side stream; whoever takes them waits for an event, not for the step. On a CPU they are
copied once. When the host memory set aside is full the step waits, and the wait is counted; nothing is dropped.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_overlay.capture.limits import HOST_BYTES


@dataclass(frozen=True)
class HostRows:
    """Rows of one step on the host, to be released when they have been written: the memory is used again.

    `rows` `[n, layers, hidden]` in the model's dtype; `tokens` int32 `[n]`; `peaks` float32 `[n, layers]`, the largest
    absolute value of each row.
    """

    rows: torch.Tensor
    tokens: NDArray[np.int32]
    peaks: NDArray[np.float32]
    release: Callable[[], None]


@dataclass(frozen=True)
class Arrival:
    """Rows on their way: `wait` returns them when they are on the host, and `is_here` says whether they are."""

    wait: Callable[[], HostRows]
    is_here: Callable[[], bool]


@dataclass(frozen=True)
class JoinedRows:
    """Rows, tokens and peaks of some steps, as HostRows has those of one."""

    rows: torch.Tensor
    tokens: NDArray[np.int32]
    peaks: NDArray[np.float32]


def join_rows(steps: Sequence[HostRows]) -> JoinedRows:
    """Without a copy of rows that lie behind each other, as a ring's do. They are the steps' own until released."""
    return JoinedRows(
        _join_adjacent([step.rows for step in steps]),
        np.concatenate([step.tokens for step in steps]),
        np.concatenate([step.peaks for step in steps]),
    )


def _join_adjacent(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    first = parts[0]
    ends = [part.data_ptr() + part.nbytes for part in parts]
    same_memory = all(part.untyped_storage().data_ptr() == first.untyped_storage().data_ptr() for part in parts)
    if same_memory and all(end == part.data_ptr() for end, part in zip(ends, parts[1:], strict=False)):
        return first.as_strided((sum(map(len, parts)), *first.shape[1:]), first.stride())
    return torch.cat(list(parts))


class Transfer(Protocol):
    """Takes rows out of the buffer before the next step overwrites them."""

    @property
    def num_waits(self) -> int:
        """How often a step waited for room."""
        ...

    def send(self, count: int, indices: NDArray[np.int64] | None, tokens: torch.Tensor) -> Arrival:
        """Start the copy of `count` rows. `tokens` int32 `[>= all rows]`."""
        ...


def open_transfer(buffer: torch.Tensor) -> Transfer:
    """The transfer for the device that the buffer `[max tokens, layers, hidden]` lives on."""
    if buffer.device.type == "cuda":
        return CudaTransfer(buffer)
    return CpuTransfer(buffer)


class CpuTransfer:
    """Copies rows within host memory."""

    def __init__(self, buffer: torch.Tensor) -> None:
        self._buffer = buffer
        self._limit = max(HOST_BYTES, 2 * buffer.nbytes)
        self._used = 0
        self._room = threading.Condition()
        self.num_waits = 0

    def send(self, count: int, indices: NDArray[np.int64] | None, tokens: torch.Tensor) -> Arrival:
        nbytes = count * self._buffer[0].nbytes
        self._take(nbytes)
        if indices is None:
            rows, kept = self._buffer[:count].clone(), tokens[:count].clone()
        else:
            index = torch.from_numpy(indices)
            rows, kept = self._buffer.index_select(0, index), tokens.index_select(0, index)
        host = HostRows(rows, kept.numpy(), find_peaks(rows).numpy(), lambda: self._give_back(nbytes))
        return Arrival(lambda: host, lambda: True)

    def _take(self, nbytes: int) -> None:
        with self._room:
            if self._used + nbytes > self._limit:
                self.num_waits += 1
                self._room.wait_for(lambda: self._used + nbytes <= self._limit)
            self._used += nbytes

    def _give_back(self, nbytes: int) -> None:
        with self._room:
            self._used -= nbytes
            self._room.notify()


class CudaTransfer:
    """Two device staging buffers, a side stream, and a ring of pinned host rows.

    Each torch call costs the step's thread some microseconds, so that tokens and peaks travel in one copy.
    """

    def __init__(self, buffer: torch.Tensor) -> None:
        self._buffer = buffer
        self._num_layers = buffer.shape[1]
        self._stream = torch.cuda.Stream(buffer.device)
        self._staging = [_Staging(buffer) for _ in range(2)]
        self._turn = 0
        capacity = max(4 * len(buffer), HOST_BYTES // buffer[0].nbytes)
        self._ring = Ring(capacity)
        self._rows = torch.empty(capacity, *buffer.shape[1:], dtype=buffer.dtype, pin_memory=True)
        self._facts = torch.empty(capacity, self._num_layers + 1, dtype=torch.int32, pin_memory=True)

    @property
    def num_waits(self) -> int:
        return self._ring.num_waits

    def send(self, count: int, indices: NDArray[np.int64] | None, tokens: torch.Tensor) -> Arrival:
        start = self._ring.take(count)
        rows, facts = self._rows[start : start + count], self._facts[start : start + count].view(-1)
        staging = self._staging[self._turn]
        self._turn = 1 - self._turn
        step = torch.cuda.current_stream(self._buffer.device)
        step.wait_event(staging.copied)
        staged_facts = staging.fill(self._buffer, tokens, count, indices)
        staging.filled.record(step)
        self._stream.wait_event(staging.filled)
        with torch.cuda.stream(self._stream):
            rows.copy_(staging.rows[:count], non_blocking=True)
            facts.copy_(staged_facts, non_blocking=True)
        # Blocking: the writer's thread sleeps until the rows are there, and does not spin on a core of the engine's.
        arrived = staging.copied = torch.cuda.Event(blocking=True)
        arrived.record(self._stream)

        def wait() -> HostRows:
            arrived.synchronize()
            seen, peaks = split_facts(facts, self._num_layers)
            return HostRows(rows, seen.numpy(), peaks.numpy(), self._ring.give_back)

        return Arrival(wait, arrived.query)


class _Staging:
    """A copy of a step's rows on the device. `filled` and `copied`: events of its way in, and out to the host."""

    def __init__(self, buffer: torch.Tensor) -> None:
        self.rows = torch.empty_like(buffer)
        self.facts = torch.empty(len(buffer) * (buffer.shape[1] + 1), dtype=torch.int32, device=buffer.device)
        self.filled = torch.cuda.Event()
        self.copied = torch.cuda.Event(blocking=True)

    def fill(
        self, buffer: torch.Tensor, tokens: torch.Tensor, count: int, indices: NDArray[np.int64] | None
    ) -> torch.Tensor:
        """Take `count` rows over. Returns their tokens and peaks, as `split_facts` takes them apart."""
        rows, facts = self.rows[:count], self.facts[: count * (buffer.shape[1] + 1)]
        staged_tokens, staged_peaks = split_facts(facts, buffer.shape[1])
        if indices is None:
            rows.copy_(buffer[:count])
            staged_tokens.copy_(tokens[:count])
        else:
            index = torch.from_numpy(indices).to(buffer.device, non_blocking=True)
            torch.index_select(buffer, 0, index, out=rows)
            staged_tokens.copy_(tokens.index_select(0, index))
        torch.linalg.vector_norm(rows, ord=float("inf"), dim=-1, dtype=torch.float32, out=staged_peaks)
        return facts


def split_facts(facts: torch.Tensor, num_layers: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of n rows, int32 `[n * (layers + 1)]`: views of the tokens, int32 `[n]`, and the peaks, float32 `[n, layers]`."""
    count = len(facts) // (num_layers + 1)
    return facts[:count], facts[count:].view(torch.float32).view(count, num_layers)


class Ring:
    """Places in `capacity` host rows, given out in order and given back in the same order.

    A step takes as many places as it has rows, so that hundreds of decode steps fit where a few prefill steps do.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._taken: deque[tuple[int, int]] = deque()  # [start, end), oldest first
        self._room = threading.Condition()
        self.num_waits = 0

    def take(self, count: int) -> int:
        """The first of `count` places next to each other; waits, and counts it, while there are none."""
        with self._room:
            if self._find(count) is None:
                self.num_waits += 1
                self._room.wait_for(lambda: self._find(count) is not None)
            start = self._find(count)
            assert start is not None
            self._taken.append((start, start + count))
            return start

    def give_back(self) -> None:
        """The places taken longest ago are free again."""
        with self._room:
            self._taken.popleft()
            self._room.notify()

    def _find(self, count: int) -> int | None:
        if not self._taken:
            return 0
        oldest, end = self._taken[0][0], self._taken[-1][1]
        if end <= oldest:  # what is taken runs over the end and goes on at the start
            return end if end + count <= oldest else None
        if end + count <= self._capacity:
            return end
        return 0 if count <= oldest else None


def find_peaks(rows: torch.Tensor) -> torch.Tensor:
    """The largest absolute value of each row, float32 `[n, layers]`; NaN where the row holds one."""
    peaks: torch.Tensor = torch.linalg.vector_norm(rows, ord=float("inf"), dim=-1, dtype=torch.float32)
    return peaks
