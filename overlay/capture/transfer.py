"""The way of a step's rows from the tapped buffer to host memory, out of the way of the next step.

On CUDA the rows go device-to-device into one of two staging buffers on the step's own stream (microseconds), and from
there to pinned memory on a side stream; whoever takes them waits for an event, not for the step. On a CPU they are
copied once. When the host memory set aside is full the step waits, and the wait is counted; nothing is dropped.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_overlay.capture.limits import HOST_BYTES


@dataclass(frozen=True)
class HostRows:
    """Rows of one step on the host, to be released when they have been written.

    `rows` `[n, layers, hidden]` in the model's dtype; `tokens` int64 `[n]`; `peaks` float32 `[n, layers]`, the largest
    absolute value of each row.
    """

    rows: torch.Tensor
    tokens: NDArray[np.int64]
    peaks: NDArray[np.float32]
    release: Callable[[], None]


class Transfer(Protocol):
    """Takes rows out of the buffer before the next step overwrites them."""

    @property
    def num_waits(self) -> int:
        """How often a step waited for room."""
        ...

    def send(self, count: int, indices: NDArray[np.int64] | None, tokens: torch.Tensor) -> Callable[[], HostRows]:
        """Start the copy of `count` rows; what is returned waits for its end. `tokens` int32 `[>= all rows]`."""
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

    def send(self, count: int, indices: NDArray[np.int64] | None, tokens: torch.Tensor) -> Callable[[], HostRows]:
        nbytes = count * self._buffer[0].nbytes
        self._take(nbytes)
        if indices is None:
            rows, kept = self._buffer[:count].clone(), tokens[:count].clone()
        else:
            index = torch.from_numpy(indices)
            rows, kept = self._buffer.index_select(0, index), tokens.index_select(0, index)
        host = HostRows(rows, kept.to(torch.int64).numpy(), find_peaks(rows).numpy(), lambda: self._give_back(nbytes))
        return lambda: host

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
    """Two device staging buffers, a side stream, and a ring of pinned host rows."""

    def __init__(self, buffer: torch.Tensor) -> None:
        self._buffer = buffer
        self._stream = torch.cuda.Stream(buffer.device)
        self._staging = [_Staging.beside(buffer) for _ in range(2)]
        self._turn = 0
        capacity = max(4 * len(buffer), HOST_BYTES // buffer[0].nbytes)
        self._ring = Ring(capacity)
        self._rows = torch.empty(capacity, *buffer.shape[1:], dtype=buffer.dtype, pin_memory=True)
        self._tokens = torch.empty(capacity, dtype=torch.int32, pin_memory=True)
        self._peaks = torch.empty(capacity, buffer.shape[1], dtype=torch.float32, pin_memory=True)

    @property
    def num_waits(self) -> int:
        return self._ring.num_waits

    def send(self, count: int, indices: NDArray[np.int64] | None, tokens: torch.Tensor) -> Callable[[], HostRows]:
        start = self._ring.take(count)
        place = slice(start, start + count)
        staging = self._staging[self._turn]
        self._turn = 1 - self._turn
        step = torch.cuda.current_stream(self._buffer.device)
        step.wait_event(staging.copied)
        staging.fill(self._buffer, tokens, count, indices)
        self._stream.wait_stream(step)
        with torch.cuda.stream(self._stream):
            self._rows[place].copy_(staging.rows[:count], non_blocking=True)
            self._tokens[place].copy_(staging.tokens[:count], non_blocking=True)
            self._peaks[place].copy_(staging.peaks[:count], non_blocking=True)
            staging.copied.record(self._stream)
            arrived = torch.cuda.Event()
            arrived.record(self._stream)

        def wait() -> HostRows:
            arrived.synchronize()
            tokens_64 = self._tokens[place].numpy().astype(np.int64)
            return HostRows(self._rows[place], tokens_64, self._peaks[place].numpy(), self._ring.give_back)

        return wait


@dataclass(frozen=True)
class _Staging:
    """A copy of a step's rows on the device; `copied` is recorded when it has left for the host."""

    rows: torch.Tensor
    tokens: torch.Tensor
    peaks: torch.Tensor
    copied: Any

    @staticmethod
    def beside(buffer: torch.Tensor) -> _Staging:
        tokens = torch.empty(len(buffer), dtype=torch.int32, device=buffer.device)
        peaks = torch.empty(buffer.shape[:2], dtype=torch.float32, device=buffer.device)
        return _Staging(torch.empty_like(buffer), tokens, peaks, torch.cuda.Event())

    def fill(self, buffer: torch.Tensor, tokens: torch.Tensor, count: int, indices: NDArray[np.int64] | None) -> None:
        if indices is None:
            self.rows[:count].copy_(buffer[:count])
            self.tokens[:count].copy_(tokens[:count])
        else:
            index = torch.from_numpy(indices).to(buffer.device, non_blocking=True)
            torch.index_select(buffer, 0, index, out=self.rows[:count])
            self.tokens[:count].copy_(tokens.index_select(0, index))
        self.peaks[:count].copy_(find_peaks(self.rows[:count]))


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
