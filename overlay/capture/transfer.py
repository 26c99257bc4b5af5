"""The way of a step's rows from the tapped buffer to host memory, out of the way of the next step.

On CUDA the rows go device-to-device into one of two staging buffers on the step's own stream (microseconds), and from
there to pinned memory on a side stream; whoever takes them waits for an event, not for the step. On a CPU they are
copied once. When all host slots are in use the step waits, and the wait is counted; nothing is dropped.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

# Host memory that rows may take before the step waits for the writer; at least two steps fit whatever their size.
HOST_BYTES = 512 * 2**20


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

    num_waits: int

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
        host = HostRows(rows, kept.to(torch.int64).numpy(), _peaks(rows).numpy(), lambda: self._give_back(nbytes))
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
    """Two device staging buffers, a side stream, and a ring of pinned host slots."""

    def __init__(self, buffer: torch.Tensor) -> None:
        self._buffer = buffer
        self._stream = torch.cuda.Stream(buffer.device)  # type: ignore[no-untyped-call]
        self._staging = [_Slot.on_device(buffer) for _ in range(2)]
        self._turn = 0
        self._free: queue.SimpleQueue[_Slot] = queue.SimpleQueue()
        for _ in range(max(2, HOST_BYTES // buffer.nbytes)):
            self._free.put(_Slot.pinned(buffer))
        self.num_waits = 0

    def send(self, count: int, indices: NDArray[np.int64] | None, tokens: torch.Tensor) -> Callable[[], HostRows]:
        slot = self._take_slot()
        staging = self._staging[self._turn]
        self._turn = 1 - self._turn
        step = torch.cuda.current_stream(self._buffer.device)
        step.wait_event(staging.copied)
        if indices is None:
            staging.rows[:count].copy_(self._buffer[:count])
            staging.tokens[:count].copy_(tokens[:count])
        else:
            index = torch.from_numpy(indices).to(self._buffer.device, non_blocking=True)
            torch.index_select(self._buffer, 0, index, out=staging.rows[:count])
            staging.tokens[:count].copy_(tokens.index_select(0, index))
        staging.peaks[:count].copy_(_peaks(staging.rows[:count]))
        self._stream.wait_stream(step)
        with torch.cuda.stream(self._stream):
            slot.copy_from(staging, count)
            staging.copied.record(self._stream)
            slot.copied.record(self._stream)

        def wait() -> HostRows:
            slot.copied.synchronize()
            tokens_64 = slot.tokens[:count].numpy().astype(np.int64)
            return HostRows(slot.rows[:count], tokens_64, slot.peaks[:count].numpy(), lambda: self._free.put(slot))

        return wait

    def _take_slot(self) -> _Slot:
        try:
            return self._free.get_nowait()
        except queue.Empty:
            self.num_waits += 1
            return self._free.get()


@dataclass(frozen=True)
class _Slot:
    rows: torch.Tensor
    tokens: torch.Tensor
    peaks: torch.Tensor
    copied: Any

    @staticmethod
    def on_device(buffer: torch.Tensor) -> _Slot:
        tokens = torch.empty(buffer.shape[0], dtype=torch.int32, device=buffer.device)
        peaks = torch.empty(buffer.shape[:2], dtype=torch.float32, device=buffer.device)
        return _Slot(torch.empty_like(buffer), tokens, peaks, torch.cuda.Event())  # type: ignore[no-untyped-call]

    @staticmethod
    def pinned(buffer: torch.Tensor) -> _Slot:
        rows = torch.empty(buffer.shape, dtype=buffer.dtype, pin_memory=True)
        tokens = torch.empty(buffer.shape[0], dtype=torch.int32, pin_memory=True)
        peaks = torch.empty(buffer.shape[:2], dtype=torch.float32, pin_memory=True)
        return _Slot(rows, tokens, peaks, torch.cuda.Event())  # type: ignore[no-untyped-call]

    def copy_from(self, other: _Slot, count: int) -> None:
        self.rows[:count].copy_(other.rows[:count], non_blocking=True)
        self.tokens[:count].copy_(other.tokens[:count], non_blocking=True)
        self.peaks[:count].copy_(other.peaks[:count], non_blocking=True)


def _peaks(rows: torch.Tensor) -> torch.Tensor:
    """The largest absolute value of each row, float32 `[n, layers]`; NaN where the row holds one."""
    peaks: torch.Tensor = torch.linalg.vector_norm(rows, ord=float("inf"), dim=-1, dtype=torch.float32)
    return peaks
