"""The writer thread: rows into the log, records into the index, in the order in which the steps were taken.

It also looks at every row once: one that is all zero or not finite is refused with its request and position (states
of zeros have trained drafts that accepted nothing), and so is a row whose token is not the one the prompt has there.
"""

from __future__ import annotations

import queue
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vllm_overlay.capture.rows import MISSING, Plan, Rows
from vllm_overlay.capture.transfer import HostRows
from vllm_overlay.errors import OverlayError
from vllm_overlay.store import PendingRecord, StoreWriter

# Records wait this long for others before they are committed together: a commit syncs the disk.
COMMIT_INTERVAL_S = 0.5

# The writer shares the interpreter with the thread that runs the model, which gives up the GIL at every CUDA call and
# wants it back at once: by default Python lets the other thread keep it for 5 ms, a third of a decode step.
SWITCH_INTERVAL_S = 0.0001


class CaptureError(OverlayError):
    """Hidden states that are not what they should be, or that could not be written."""


@dataclass(frozen=True)
class RequestFacts:
    """What is known of a captured request when it begins. `prompt` int64 `[prompt tokens]`, -1 for no known token."""

    request_id: str
    prompt: NDArray[np.int64]
    tag: str | None
    loss_spans: tuple[tuple[int, int], ...] | None


@dataclass
class Statistics:
    """Counts since the session began. `num_incomplete` records have rows missing and say so."""

    num_rows: int = 0
    num_bytes: int = 0
    num_records: int = 0
    num_incomplete: int = 0


@dataclass
class _Open:
    facts: RequestFacts
    # (first position, tokens) of each step that computed positions behind the prompt; a later one supersedes.
    generated: list[tuple[int, NDArray[np.int64]]] = field(default_factory=list)


class Recorder:
    """Owns the store's writer and the thread that uses it. An error of the thread is raised by the next call."""

    def __init__(self, writer: StoreWriter, layer_ids: tuple[int, ...]) -> None:
        self._writer = writer
        self._layer_ids = layer_ids
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._open: dict[str, _Open] = {}
        self._ready: list[PendingRecord] = []
        self._committed_at = time.monotonic()
        self.statistics = Statistics()
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        self._thread = threading.Thread(target=self._run, name="vllm-overlay-writer", daemon=True)
        self._thread.start()

    def begin(self, key: str, facts: RequestFacts) -> None:
        """A captured request was scheduled for the first time."""
        self._post(lambda: self._open.update({key: _Open(facts)}))

    def write(self, plan: Plan, wait_for_rows: Callable[[], HostRows]) -> None:
        """Rows of one step are on their way to the host."""
        self._post(lambda: self._write(plan, wait_for_rows))

    def finish(self, key: str, rows: Rows, reason: str) -> None:
        """A request ended; `rows` are the row numbers of its positions."""
        self._post(lambda: self._finish(key, rows, reason))

    def flush(self) -> None:
        """Return when everything posted so far is committed. Errors: whatever writing it raised."""
        done = threading.Event()
        self._post(lambda: self._commit_and_tell(done))
        while not done.wait(0.05):
            self._raise_error()
        self._raise_error()

    def close(self) -> None:
        """Flush, stop the thread and close the store."""
        try:
            self.flush()
        finally:
            self._inbox.put(None)
            self._thread.join()
            self._writer.close()

    @property
    def backlog(self) -> int:
        """Messages that the thread has not taken up yet."""
        return self._inbox.qsize()

    def _post(self, message: Callable[[], Any]) -> None:
        self._raise_error()
        self._inbox.put(message)

    def _raise_error(self) -> None:
        if self._error is not None:
            raise CaptureError(f"capture stopped: {type(self._error).__name__}: {self._error}") from self._error

    def _run(self) -> None:
        while True:
            try:
                message = self._inbox.get(timeout=COMMIT_INTERVAL_S)
            except queue.Empty:
                message = self._commit
            if message is None:
                return
            try:
                message()
                if time.monotonic() - self._committed_at > COMMIT_INTERVAL_S:
                    self._commit()
            except BaseException as error:  # noqa: BLE001 - kept, and raised in the thread that captures
                self._error = self._error or error

    def _write(self, plan: Plan, wait_for_rows: Callable[[], HostRows]) -> None:
        host = wait_for_rows()
        try:
            if self._error is not None:
                return  # the room is given back all the same: a step may be waiting for it, and raises next
            refuse_bad_rows(plan, host.peaks, self._layer_ids, lambda key: self._open[key].facts.request_id)
            first = self._writer.append(host.rows)
            if first != plan.first_row:
                raise CaptureError(f"expected the store to write row {plan.first_row}, found {first}")
            self._take_tokens(plan, host.tokens)
            self.statistics.num_rows += plan.count
            self.statistics.num_bytes += host.rows.nbytes
        finally:
            host.release()

    def _take_tokens(self, plan: Plan, tokens: NDArray[np.int64]) -> None:
        for span in plan.spans:
            request = self._open[span.key]
            seen = tokens[span.offset : span.offset + span.length]
            if span.start < len(request.facts.prompt):
                refuse_other_tokens(request.facts, span.start, seen)
            if span.start + span.length > len(request.facts.prompt):
                request.generated.append((span.start, seen))

    def _finish(self, key: str, rows: Rows, reason: str) -> None:
        if self._error is not None:
            return
        request = self._open.pop(key, None)
        if request is None or not len(rows):
            return  # posted twice around a signal, or aborted before its first row
        complete = not bool((rows == MISSING).any())
        self._ready.append(
            PendingRecord(
                request_id=request.facts.request_id,
                token_ids=_join_tokens(request, len(rows)),
                rows=rows,
                num_prompt_tokens=min(len(request.facts.prompt), len(rows)),
                complete=complete,
                finish_reason=reason,
                tag=request.facts.tag,
                loss_mask=_spread_mask(request.facts.loss_spans, len(rows)),
            )
        )
        self.statistics.num_records += 1
        self.statistics.num_incomplete += not complete

    def _commit_and_tell(self, done: threading.Event) -> None:
        self._commit()
        done.set()

    def _commit(self) -> None:
        if self._ready and self._error is None:
            self._writer.commit(self._ready)
            self._ready = []
        self._committed_at = time.monotonic()


def refuse_bad_rows(
    plan: Plan, peaks: NDArray[np.float32], layer_ids: Sequence[int], name_request: Callable[[str], str]
) -> None:
    """Errors: CaptureError naming the first row that is all zero or not finite. `peaks` is float32 `[rows, layers]`."""
    bad = ~(np.isfinite(peaks) & (peaks > 0))
    if not bad.any():
        return
    row, column = map(int, np.argwhere(bad)[0])
    key, position = _find_position(plan, row)
    found = "all zero" if peaks[row, column] == 0 else "not finite"
    raise CaptureError(
        f"request {name_request(key)!r}, position {position}, layer {layer_ids[column]}: the row is {found}; the tap "
        "did not fire in this step, or the model itself computed it"
    )


def _find_position(plan: Plan, row: int) -> tuple[str, int]:
    span = next(s for s in plan.spans if s.offset <= row < s.offset + s.length)
    return span.key, span.start + row - span.offset


def refuse_other_tokens(facts: RequestFacts, start: int, seen: NDArray[np.int64]) -> None:
    """Errors: CaptureError when the step computed another token than the prompt has there."""
    known = facts.prompt[start : start + len(seen)]
    wrong = np.flatnonzero((seen[: len(known)] != known) & (known >= 0))
    if len(wrong):
        where = int(wrong[0])
        raise CaptureError(
            f"request {facts.request_id!r}, position {start + where}: expected the prompt's token {known[where]}, "
            f"found {seen[where]} in the step: rows would be crossed"
        )


def _join_tokens(request: _Open, length: int) -> NDArray[np.int64]:
    tokens = np.full(length, -1, dtype=np.int64)
    for start, seen in request.generated:
        kept = seen[: max(0, length - start)]
        tokens[start : start + len(kept)] = kept
    # Last: the step's ids of a prompt's positions are the prompt's, and -1 where the prompt has no token.
    prompt = request.facts.prompt[:length]
    tokens[: len(prompt)] = prompt
    return tokens


def _spread_mask(spans: tuple[tuple[int, int], ...] | None, length: int) -> NDArray[np.bool_] | None:
    if spans is None:
        return None
    mask = np.zeros(length, dtype=np.bool_)
    for start, end in spans:
        mask[start:end] = True
    return mask
