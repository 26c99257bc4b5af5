"""The way of a step's rows from the tapped buffer to host memory, out of the way of the next step.

On CUDA the rows go device-to-device into one of two staging buffers on the step's own stream (microseconds), and from
there to pinned memory on a side stream; whoever takes them waits for an event, not for the step. On a CPU they are
copied once. When the host memory set aside is full the step waits, and the wait is counted; nothing is dropped.

Rows that are stored in float8 are packed on the way (see store/float8.py): on CUDA on the side stream, so that half the
bytes go to the host and the step's own stream has nothing more to do.
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
from vllm_overlay.store.float8 import SCALE_BYTES, make_scratch, pack_into, pack_rows

# Device memory for rows in float32 that are being packed.
SCRATCH_BYTES = 64 << 20


@dataclass(frozen=True)
class HostRows:
    """Rows of one step on the host, to be released when they have been written: the memory is used again.

    `rows` `[n, layers, hidden]` in the model's dtype, or packed, uint8 `[n, layers, hidden + 4]`; `tokens` int32 `[n]`;
    `peaks` float32 `[n, layers]`, the largest absolute value of each row.
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


class RowForm(Protocol):
    """What a step's rows are on the host: `[n, *shape]` of `dtype`."""

    shape: tuple[int, int]
    dtype: torch.dtype

    def make(self, rows: torch.Tensor, peaks: torch.Tensor) -> torch.Tensor:
        """From rows `[n, layers, hidden]` and their peaks, float32 `[n, layers]`, on the device that they are on.

        On CUDA the next call may use the memory again: it comes on the same stream, behind the copy to the host.
        """
        ...


class PlainRows:
    """Rows as the model has them."""

    def __init__(self, buffer: torch.Tensor) -> None:
        self.shape = (buffer.shape[1], buffer.shape[2])
        self.dtype = buffer.dtype

    def make(self, rows: torch.Tensor, peaks: torch.Tensor) -> torch.Tensor:
        return rows


class CpuPackedRows:
    """Rows in float8, in memory of their own."""

    def __init__(self, buffer: torch.Tensor) -> None:
        self.shape = (buffer.shape[1], buffer.shape[2] + SCALE_BYTES)
        self.dtype = torch.uint8

    def make(self, rows: torch.Tensor, peaks: torch.Tensor) -> torch.Tensor:
        return pack_rows(rows)


class CudaPackedRows:
    """Rows in float8, in memory that is set aside before vLLM gives the rest of the device's to its KV cache."""

    def __init__(self, buffer: torch.Tensor) -> None:
        count, layers, hidden = buffer.shape
        self.shape = (layers, hidden + SCALE_BYTES)
        self.dtype = torch.uint8
        self._packed = buffer.new_empty((count, *self.shape), dtype=self.dtype)
        self._scratch = make_scratch(layers, hidden, SCRATCH_BYTES, buffer.device)

    def make(self, rows: torch.Tensor, peaks: torch.Tensor) -> torch.Tensor:
        packed = self._packed[: len(rows)]
        pack_into(packed, rows, peaks, self._scratch)
        return packed


def open_transfer(buffer: torch.Tensor, dtype: str) -> Transfer:
    """The transfer for the device that the buffer `[max tokens, layers, hidden]` lives on.

    dtype: "auto", that of the model, or "fp8", float8 with a scale for each row.
    """
    is_packed = dtype == "fp8"
    if buffer.device.type == "cuda":
        return CudaTransfer(buffer, CudaPackedRows(buffer) if is_packed else PlainRows(buffer))
    return CpuTransfer(buffer, CpuPackedRows(buffer) if is_packed else PlainRows(buffer))


class CpuTransfer:
    """Copies rows within host memory."""

    def __init__(self, buffer: torch.Tensor, form: RowForm) -> None:
        self._buffer = buffer
        self._form = form
        self._row_bytes = _count_bytes(form)
        self._limit = max(HOST_BYTES, 2 * len(buffer) * self._row_bytes)
        self._used = 0
        self._room = threading.Condition()
        self.num_waits = 0

    def send(self, count: int, indices: NDArray[np.int64] | None, tokens: torch.Tensor) -> Arrival:
        nbytes = count * self._row_bytes
        self._take(nbytes)
        if indices is None:
            rows, kept = self._buffer[:count].clone(), tokens[:count].clone()
        else:
            index = torch.from_numpy(indices)
            rows, kept = self._buffer.index_select(0, index), tokens.index_select(0, index)
        peaks = find_peaks(rows)
        host = HostRows(self._form.make(rows, peaks), kept.numpy(), peaks.numpy(), lambda: self._give_back(nbytes))
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

    def __init__(self, buffer: torch.Tensor, form: RowForm) -> None:
        self._buffer = buffer
        self._form = form
        self._num_layers = buffer.shape[1]
        self._stream = torch.cuda.Stream(buffer.device)
        self._staging = [_Staging(buffer) for _ in range(2)]
        self._turn = 0
        capacity = max(4 * len(buffer), HOST_BYTES // _count_bytes(form))
        self._ring = Ring(capacity)
        self._rows = torch.empty(capacity, *form.shape, dtype=form.dtype, pin_memory=True)
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
        staged_facts, peaks = staging.fill(self._buffer, tokens, count, indices)
        staging.filled.record(step)
        self._stream.wait_event(staging.filled)
        with torch.cuda.stream(self._stream):
            rows.copy_(self._form.make(staging.rows[:count], peaks), non_blocking=True)
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
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Take `count` rows over. Returns their tokens and peaks in one, as `split_facts` takes them apart, and the
        peaks, float32 `[count, layers]`."""
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
        return facts, staged_peaks


def _count_bytes(form: RowForm) -> int:
    """Of a token's rows on the host."""
    layers, width = form.shape
    return layers * width * form.dtype.itemsize


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
