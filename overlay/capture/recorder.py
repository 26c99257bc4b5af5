"""The writer thread: rows into the log, records into the index, in the order in which the steps were taken.

It also looks at every row once: one that is all zero or not finite is refused in its step, with its request and
position (states of zeros have trained drafts that accepted nothing). When a request ends, so is a row, of whatever
request it was first, whose token is not the one that the prompt has there.

It shares the interpreter's lock with the thread that runs the model, and takes it from that thread each time it takes
something up: the rows of small steps wait for each other and are written together, and what it does for them takes as
long for one request as for a thousand.
"""

from __future__ import annotations

import logging
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vllm_overlay.capture.row_tokens import RowTokens
from vllm_overlay.capture.rows import MISSING, Plan, Rows
from vllm_overlay.capture.transfer import Arrival, HostRows, join_rows
from vllm_overlay.errors import OverlayError
from vllm_overlay.store import PendingRecord, StoreWriter

logger = logging.getLogger("vllm_overlay.capture")

# Records wait this long for others before they are committed together: a commit syncs the disk.
COMMIT_INTERVAL_S = 0.5

# Rows of small steps wait this long for others, some decode steps, or until there are so many.
TAKE_UP_INTERVAL_S = 0.1
ROWS_AT_ONCE = 2048

# The writer shares the interpreter with the thread that runs the model, which gives up the GIL at every CUDA call and
# wants it back at once: by default Python lets the other thread keep it for 5 ms, a third of a decode step.
SWITCH_INTERVAL_S = 0.0001


class CaptureError(OverlayError):
    """Hidden states that are not what they should be, or that could not be written."""


@dataclass(frozen=True)
class RequestFacts:
    """What is known of a captured request when it begins.

    `prompt` int64 `[prompt tokens]`, -1 for no known token. `number` counts the engine's captured requests. The record
    is to begin at `first_position` of the request.
    """

    request_id: str
    prompt: NDArray[np.int64]
    tag: str | None
    loss_spans: tuple[tuple[int, int], ...] | None
    number: int = 0
    first_position: int = 0


@dataclass(frozen=True)
class Beginning:
    """A captured request was scheduled for the first time."""

    key: str
    facts: RequestFacts


@dataclass(frozen=True)
class Ending:
    """A captured request ended, for vLLM's `reason`; `rows` are those that its record is to have."""

    key: str
    rows: Rows
    reason: str


@dataclass(frozen=True)
class StepRows:
    """The rows of one step, on their way to the host."""

    plan: Plan
    arrival: Arrival


# None is the last one.
Message = Beginning | Ending | StepRows | Callable[[], Any] | None


@dataclass
class Statistics:
    """Counts since the session began. `num_incomplete` records have rows missing and say so."""

    num_rows: int = 0
    num_bytes: int = 0
    num_records: int = 0
    num_incomplete: int = 0


class Recorder:
    """Owns the store's writer and the thread that uses it. An error of the thread is raised by the next call."""

    def __init__(self, writer: StoreWriter, layer_ids: tuple[int, ...]) -> None:
        self._writer = writer
        self._layer_ids = layer_ids
        self._inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._is_due = threading.Event()
        self._num_waiting = 0  # rows that were posted since it was last set
        self._error: BaseException | None = None
        self._requests: dict[str, RequestFacts] = {}
        self._tokens = RowTokens()
        self._ended: list[Ending] = []
        self._ready: list[PendingRecord] = []
        self._committed_at = time.monotonic()
        self._after_commit: Callable[[], None] = _do_nothing
        self.statistics = Statistics()
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        self._thread = threading.Thread(target=self._run, name="vllm-overlay-writer", daemon=True)
        self._thread.start()

    def begin(self, key: str, facts: RequestFacts) -> None:
        """A captured request was scheduled for the first time."""
        self._post(Beginning(key, facts))

    def write(self, plan: Plan, arrival: Arrival) -> None:
        """Rows of one step are on their way to the host."""
        self._post(StepRows(plan, arrival))
        self._num_waiting += plan.count
        if self._num_waiting >= ROWS_AT_ONCE:
            self._num_waiting = 0
            self._is_due.set()

    def finish(self, key: str, rows: Rows, reason: str) -> None:
        """A request ended; `rows` are the row numbers of the positions that its record is to have."""
        self._post(Ending(key, rows, reason))

    def keep_tokens(self, chunks: Set[int]) -> None:
        """Requests that end from now on have no rows outside these chunks of CHUNK_ROWS (see row_tokens.py)."""
        self._post(lambda: self._tokens.keep(chunks))

    def flush(self) -> None:
        """Return when everything posted so far is committed. Errors: whatever writing it raised."""
        done = threading.Event()
        self._post(lambda: self._commit_and_tell(done))
        self._is_due.set()
        while not done.wait(0.05):
            self._raise_error()
        self._raise_error()

    def close(self) -> None:
        """Commit everything, stop the thread and close the store. Errors: whatever writing raised.

        It may be called again when a signal interrupted it.
        """
        self._inbox.put(None)
        self._is_due.set()
        self._thread.join()
        try:
            self._writer.close()
        finally:
            self._raise_error()

    def call_after_commits(self, call: Callable[[], None]) -> None:
        """From now on the thread calls this after every commit, and twice a second when there is nothing to commit."""
        self._after_commit = call

    @property
    def log(self) -> int:
        """The number of the log that is written."""
        return self._writer.log

    @property
    def backlog(self) -> int:
        """Messages that the thread has not taken up yet."""
        return self._inbox.qsize()

    def _post(self, message: Message) -> None:
        self._raise_error()
        self._inbox.put(message)

    def _raise_error(self) -> None:
        if self._error is not None:
            raise CaptureError(f"capture stopped: {type(self._error).__name__}: {self._error}") from self._error

    def _run(self) -> None:
        goes_on = True
        while goes_on:
            self._is_due.wait(TAKE_UP_INTERVAL_S)
            self._is_due.clear()
            goes_on = self._take_up()

    def _take_up(self) -> bool:
        """Do what was posted until now: write rows first, then all else in its order. False after the last message."""
        posted = [self._inbox.get() for _ in range(self._inbox.qsize())]
        steps = [message for message in posted if isinstance(message, StepRows)]
        known = self._requests | {message.key: message.facts for message in posted if isinstance(message, Beginning)}
        while steps:
            with self._keeping_error(), _taking_arrived(steps) as arrived:
                self._write(arrived, known)
        for message in posted:
            with self._keeping_error():
                self._settle(message)
        with self._keeping_error():
            self._finish_ended()
        ends = None in posted
        if ends or time.monotonic() - self._committed_at > COMMIT_INTERVAL_S:
            with self._keeping_error():
                self._commit()
        return not ends

    @contextmanager
    def _keeping_error(self) -> Iterator[None]:
        """The first error is kept, and raised in the thread that captures."""
        try:
            yield
        except BaseException as error:  # noqa: BLE001
            self._error = self._error or error

    def _settle(self, message: Message) -> None:
        if isinstance(message, Ending):
            self._ended.append(message)
            return
        self._finish_ended()
        if isinstance(message, Beginning):
            self._requests[message.key] = message.facts
        elif message is not None and not isinstance(message, StepRows):
            message()

    def _write(self, arrived: Sequence[tuple[Plan, HostRows]], known: Mapping[str, RequestFacts]) -> None:
        if self._error is not None:
            return
        host = join_rows([rows for _, rows in arrived])
        if find_bad(host.peaks).any():
            for plan, rows in arrived:
                refuse_bad_rows(plan, rows.peaks, self._layer_ids, lambda key: known[key].request_id)
        first = self._writer.append(host.rows)
        if first != arrived[0][0].first_row:
            raise CaptureError(f"expected the store to write row {arrived[0][0].first_row}, found {first}")
        self._tokens.put(first, host.tokens)
        self.statistics.num_rows += len(host.rows)
        self.statistics.num_bytes += host.rows.nbytes

    def _finish_ended(self) -> None:
        """Make records of the requests that ended one after the other, at once: a batch ends with hundreds."""
        ended, self._ended = self._ended, []
        if self._error is not None:
            return
        # One that is not known was posted twice, around a signal.
        known = [(ending, self._requests.pop(ending.key)) for ending in ended if ending.key in self._requests]
        if not known:
            return
        ends = np.cumsum([len(ending.rows) for ending, _ in known])
        seen = np.split(self._tokens.find(np.concatenate([ending.rows for ending, _ in known])), ends[:-1])
        for (ending, facts), tokens in zip(known, seen, strict=True):
            self._finish(ending, facts, tokens)

    def _finish(self, ending: Ending, facts: RequestFacts, seen: NDArray[np.int64]) -> None:
        rows = ending.rows
        if not len(rows):
            _say_why_empty(facts, ending.reason)
            return
        complete = not bool((rows == MISSING).any())
        self._ready.append(
            PendingRecord(
                request_id=facts.request_id,
                token_ids=_join_tokens(facts, rows, seen),
                rows=rows,
                num_prompt_tokens=min(max(0, len(facts.prompt) - facts.first_position), len(rows)),
                complete=complete,
                finish_reason=ending.reason,
                tag=facts.tag,
                loss_mask=_spread_mask(facts, len(rows)),
                number=facts.number,
                first_position=facts.first_position,
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
        self._after_commit()


def _do_nothing() -> None:
    """Nobody wants to be called."""


@contextmanager
def _taking_arrived(steps: list[StepRows]) -> Iterator[list[tuple[Plan, HostRows]]]:
    """Wait for the first step's rows, and take it off the list with those behind it whose rows are here as well.

    They are given back at the end whatever happened: a step may be waiting for the room. No more are taken than a big
    step has, for their memory is given back only when all of them are written.
    """
    arrived: list[tuple[Plan, HostRows]] = []
    try:
        taken = 0
        while steps and (not arrived or (taken < ROWS_AT_ONCE and steps[0].arrival.is_here())):
            step = steps.pop(0)
            arrived.append((step.plan, step.arrival.wait()))
            taken += step.plan.count
        yield arrived
    finally:
        for _, rows in arrived:
            rows.release()


def find_bad(peaks: NDArray[np.float32]) -> NDArray[np.bool_]:
    """Which rows are all zero or not finite: bool `[rows, layers]`, as `peaks`."""
    bad: NDArray[np.bool_] = ~(np.isfinite(peaks) & (peaks > 0))
    return bad


def refuse_bad_rows(
    plan: Plan, peaks: NDArray[np.float32], layer_ids: Sequence[int], name_request: Callable[[str], str]
) -> None:
    """Errors: CaptureError naming the first row that is all zero or not finite. `peaks` is float32 `[rows, layers]`."""
    bad = find_bad(peaks)
    if not bad.any():
        return
    row, column = map(int, np.argwhere(bad)[0])
    key, position = plan.find_position(row)
    found = "all zero" if peaks[row, column] == 0 else "not finite"
    raise CaptureError(
        f"request {name_request(key)!r}, position {position}, layer {layer_ids[column]}: the row is {found}; the tap "
        "did not fire in this step, or the model itself computed it"
    )


def refuse_other_tokens(facts: RequestFacts, start: int, seen: NDArray[np.int64]) -> None:
    """Errors: CaptureError when the rows from position `start` on were computed from other tokens than the prompt's."""
    known = facts.prompt[start : start + len(seen)]
    wrong = np.flatnonzero((seen[: len(known)] != known) & (known >= 0))
    if len(wrong):
        where = int(wrong[0])
        raise CaptureError(
            f"request {facts.request_id!r}, position {start + where}: expected the prompt's token {known[where]}, "
            f"found {seen[where]} in the step: rows would be crossed"
        )


def _join_tokens(facts: RequestFacts, rows: Rows, seen: NDArray[np.int64]) -> NDArray[np.int64]:
    """The record's tokens: the prompt's, -1 where it has none, then those that its rows were computed from."""
    first = facts.first_position
    prompt = facts.prompt[first : first + len(rows)]
    # A missing row was computed from no token that we saw.
    refuse_other_tokens(facts, first, np.where(rows[: len(prompt)] == MISSING, prompt, seen[: len(prompt)]))
    return np.concatenate([prompt, seen[len(prompt) :]])


def _spread_mask(facts: RequestFacts, length: int) -> NDArray[np.bool_] | None:
    """Of the record's positions, bool `[length]`."""
    if facts.loss_spans is None:
        return None
    mask = np.zeros(facts.first_position + length, dtype=np.bool_)
    for start, end in facts.loss_spans:
        mask[start:end] = True
    return mask[facts.first_position :]


def _say_why_empty(facts: RequestFacts, reason: str) -> None:
    if reason != "abort":
        logger.warning(
            "request %r ended before position %d, where its window begins: it has no record",
            facts.request_id,
            facts.first_position,
        )
