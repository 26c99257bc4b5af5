"""Row accounting over 2,000 generated step streams: each (request, position) once, with the state computed for it.

`step_streams` is the scheduler. Here is the other side: a worker that applies a RowBook as `capture/session.py` does,
beside a KV cache that knows what each slot really holds, and the faults that the same search must find.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st

from tests.unit.step_streams import END, Entry, Request, ScheduledStep, Scheduler, Setup
from vllm_overlay.capture.finished import FinishedRequest, close_workers
from vllm_overlay.capture.rows import MISSING, NOTHING, WHOLE, NewRequest, Plan, RowBook, Rows, Step, Window

LENGTHS, OWN_LENGTHS = (1, 3, 4, 8, 17), (0, 1, 5, 16)  # of shared beginnings, and behind them
MAX_OUTPUT, MAX_DRAFTS, MAX_DEPTH = 9, 3, 3
NUM_EXAMPLES = 2000
PADDING = "graph padding"

ORDERS: Mapping[str, Callable[[list[Entry]], list[Entry]]] = {  # of rows in the buffer
    "as scheduled": list,
    "reversed": lambda entries: entries[::-1],
    "by token count": lambda entries: sorted(entries, key=lambda entry: entry.count),  # as Model Runner V2 does
    "first one last": lambda entries: entries[1:] + entries[:1],
}

WINDOWS: Mapping[str, Callable[[int], range]] = {  # of positions wanted, by the length of the prompt
    "all": lambda prompt: range(*WHOLE),
    "off": lambda prompt: range(0),
    "prompt": lambda prompt: range(prompt),
    "last": lambda prompt: range(prompt - 1, prompt),
    "from 2 to 7": lambda prompt: range(2, 7),
    "around the end of the prompt": lambda prompt: range(max(0, prompt - 3), prompt + 2),
    "from the second generated token": lambda prompt: range(prompt + 1, WHOLE.end),
}


@dataclass(frozen=True)
class Add:
    """A request of a number that is not in use. Prompts share a beginning; what is generated repeats the last token.

    `window` is one of WINDOWS.
    """

    number: int
    shared: int
    own: int
    letter: str
    outputs: int
    window: str


@dataclass(frozen=True)
class Compute:
    order: str
    accepted: int


@dataclass(frozen=True)
class Preempt:
    which: int


@dataclass(frozen=True)
class Abort:
    which: int


@dataclass(frozen=True)
class SwitchCapture:
    on: bool


Action = Add | Compute | Preempt | Abort | SwitchCapture


@dataclass(frozen=True)
class Stream:
    """`drained`: every request runs to its end, and ids are used again; else the engine is closed in the middle."""

    setup: Setup
    actions: list[Action]
    drained: bool


class Kv(NamedTuple):
    """What a KV slot holds: the state's code, and whether that state was captured."""

    code: str
    captured: bool


@dataclass
class Worker:
    """Applies steps to a RowBook as CaptureSession does, and keeps the log, the KV cache and what must be found."""

    setup: Setup
    book: RowBook
    recording: bool = True
    log: list[str] = field(default_factory=list)
    slots: dict[tuple[int, int], Kv] = field(default_factory=dict)
    live: dict[str, Request] = field(default_factory=dict)
    wanted: dict[str, range] = field(default_factory=dict)  # positions to capture
    known: dict[str, set[int]] = field(default_factory=dict)  # positions of which a captured row exists
    reached: dict[str, int] = field(default_factory=dict)  # positions computed since the last pre-emption
    last_ended: int = 0  # serial

    def execute(self, step: ScheduledStep, order: str) -> None:
        for key in sorted(step.finished, key=lambda key: step.finished.facts[key].serial):
            self.finish(key, step.finished.facts[key])
        if not step.entries:
            return
        plan = self.book.plan(self._read(step, order))
        self._compute(step)
        self._write(plan, ORDERS[order](step.entries))
        for entry in step.entries:
            self._expect(entry)

    def finish(self, key: str, fact: FinishedRequest) -> None:
        """As CaptureSession._finish."""
        if fact.serial <= self.last_ended:
            return
        self.last_ended = fact.serial
        if key not in self.book:
            return
        if self.book.is_captured(key):
            num_positions = fact.num_tokens - 1
            if fact.reason == "abort":
                num_positions = min(num_positions, self.book.count_positions(key))
            self._check_record(key, self.book.find_rows(key, num_positions))
        self.book.forget(key)
        del self.live[key]

    def _read(self, step: ScheduledStep, order: str) -> Step:
        announced = sorted((e for e in step.entries if e.kind != "running"), key=lambda entry: entry.kind)
        running = [entry for entry in step.entries if entry.kind == "running"]
        return Step(
            new=tuple(self._announce(entry) for entry in announced),
            starts={entry.request.request_id: entry.start for entry in running},
            more_blocks={entry.request.request_id: entry.blocks for entry in running},
            scheduled={entry.request.request_id: entry.count for entry in step.entries},
            order=tuple(entry.request.request_id for entry in ORDERS[order](step.entries)),
            copies=step.copies,
        )

    def _announce(self, entry: Entry) -> NewRequest:
        request, key = entry.request, entry.request.request_id
        resumed = key in self.book if self.setup.runner == "V2" else entry.kind == "resumed"
        if resumed:
            return NewRequest(key, entry.start, entry.blocks, resumed=True)
        assert key not in self.live
        self.live[key], self.known[key] = request, set()
        self.wanted[key] = request.wanted if self.recording else range(0)
        window = Window(self.wanted[key].start, self.wanted[key].stop)
        return NewRequest(key, entry.start, entry.blocks, window if self.recording else NOTHING)

    def _is_kept(self, request: Request, position: int) -> bool:
        return position in self.wanted[request.request_id]

    def _compute(self, step: ScheduledStep) -> None:
        """The model runs: blocks are copied, slots filled, and attention reads every slot before a computed one."""
        size = self.setup.block_size
        for source, destination in step.copies:
            for place in range(size):
                self.slots[destination, place] = self.slots.get((source, place), Kv("", False))
        for entry in step.entries:
            for p in range(entry.start, entry.end):
                kv = Kv(entry.code(p), self._is_kept(entry.request, p))
                self.slots[entry.table[p // size], p % size] = kv
        for entry in step.entries:
            read = [self.slots[entry.table[p // size], p % size].code for p in range(entry.start)]
            assert read == [entry.request.prefix(p + 1) for p in range(entry.start)], "the scheduler's model is wrong"

    def _write(self, plan: Plan, entries: list[Entry]) -> None:
        buffer = [entry.code(p) for entry in entries for p in range(entry.start, entry.end)] + [PADDING] * 3
        taken = buffer[: plan.count] if plan.indices is None else [buffer[index] for index in plan.indices]
        assert plan.first_row == len(self.log)
        assert len(taken) == plan.count
        kept = [(e, p) for e in entries for p in range(e.start, e.end) if self._is_kept(e.request, p)]
        assert taken == [entry.code(position) for entry, position in kept]
        named = [(span.key, span.start + step) for span in plan.spans for step in range(span.length)]
        assert named == [(entry.request.request_id, position) for entry, position in kept]
        self.log += taken

    def _expect(self, entry: Entry) -> None:
        known = self.known[entry.request.request_id]
        size = self.setup.block_size
        if entry.kind != "running" and self.setup.full_attention:
            cached = [p for p in range(entry.start) if self._is_kept(entry.request, p)]
            known.update(p for p in cached if self.slots[entry.table[p // size], p % size].captured)
        known.update(p for p in range(entry.start, entry.end) if self._is_kept(entry.request, p))
        self.reached[entry.request.request_id] = entry.end

    def _check_record(self, key: str, rows: Rows) -> None:
        request, known, wanted = self.live[key], self.known[key], self.wanted[key]
        assert request.reason is not None, f"a record of {key}, which has not ended"
        length = len(wanted[: max(0, request.num_tokens - 1 - wanted.start)])
        assert rows.max(initial=MISSING) < len(self.log), (key, rows, len(self.log))
        found = ["MISSING" if row == MISSING else self.log[row] for row in rows]
        if request.reason == "abort":
            # A resumed request that is aborted may have lost the rows that it had not come to again.
            sure = [p for p in known if p < min(request.num_tokens - 1, self.reached[key])]
            at_least = max((p + 1 - wanted.start for p in sure), default=0)
            assert at_least <= len(rows) <= length, (key, at_least, len(rows), length)
            length = len(rows)
        assert found == [request.prefix(p + 1) if p in known else "MISSING" for p in wanted[:length]], key


@dataclass
class Executor:
    """What `close_workers` needs of an engine's executor."""

    worker: Worker

    def collective_rpc(self, method: str, timeout: float, args: tuple[list[tuple[str, int, str, int]]]) -> None:
        for key, num_tokens, reason, serial in sorted(args[0], key=lambda one: one[3]):
            self.worker.finish(key, FinishedRequest(num_tokens, reason, serial))


def make_request(add: Add, request_id: str) -> Request:
    prompt = "a" * add.shared + add.letter * add.own
    text = prompt + prompt[-1] * (add.outputs - 1) + END
    return Request(request_id, len(prompt), text, WINDOWS[add.window](len(prompt)), num_tokens=len(prompt))


def open_engine(setup: Setup, make_book: Callable[..., RowBook]) -> tuple[Scheduler, Worker]:
    num_slots = setup.num_blocks * setup.block_size if setup.full_attention else 0
    book = make_book(block_size=setup.block_size, num_slots=num_slots)
    return Scheduler(setup), Worker(setup, book)


def play(stream: Stream, make_book: Callable[..., RowBook] = RowBook) -> None:
    """Errors: AssertionError when a row or a record is not what it must be."""
    scheduler, worker = open_engine(stream.setup, make_book)
    for action in stream.actions:
        if isinstance(action, Add):
            add(action, f"r{action.number}", scheduler)
        else:
            apply(action, scheduler, worker)
    while stream.drained and scheduler.live:
        apply(Compute("as scheduled", 1), scheduler, worker)
    close(scheduler, worker)


def add(action: Add, request_id: str, scheduler: Scheduler) -> None:
    """Unless the id is in use. vLLM before 0.14 takes ids as given, and one that has ended may come again at once."""
    if not any(request_id == request.request_id for request in scheduler.live):
        scheduler.add(make_request(action, request_id))


def apply(action: Action, scheduler: Scheduler, worker: Worker) -> None:
    if isinstance(action, Compute):
        worker.execute(scheduler.schedule(action.accepted), action.order)
        scheduler.deliver()
    elif isinstance(action, SwitchCapture):
        worker.recording = action.on
    elif isinstance(action, Preempt) and scheduler.running:
        scheduler.preempt(scheduler.running[action.which % len(scheduler.running)])
    elif isinstance(action, Abort) and scheduler.live:
        scheduler.finish(scheduler.live[action.which % len(scheduler.live)], "abort")


def close(scheduler: Scheduler, worker: Worker) -> None:
    close_workers(Executor(worker), scheduler)
    assert all(request.reason is None for request in worker.live.values()), "a request ended without a record"
    assert worker.book.num_live == len(worker.live)


@st.composite
def setups(draw: st.DrawFn) -> Setup:
    block_size = draw(st.sampled_from([4, 1, 2, 16]))
    depth = draw(st.integers(1, MAX_DEPTH))
    # With blocks for the longest request alone, everything comes to an end, and several requests pre-empt each other.
    longest = max(LENGTHS) + max(OWN_LENGTHS) + MAX_OUTPUT + 2 * MAX_DRAFTS + MAX_DEPTH
    return Setup(
        block_size=block_size,
        hash_size=draw(st.sampled_from([block_size, max(1, block_size // 2)])),
        num_blocks=-(-longest // block_size) + draw(st.integers(2, 4)),
        budget=draw(st.sampled_from([64, 20, 7, 3])),
        drafts=0 if depth > 1 else draw(st.integers(0, MAX_DRAFTS)),  # both at once are refused by CaptureSession
        depth=depth,
        runner=draw(st.sampled_from(["V1", "V2"])),
        full_attention=draw(st.sampled_from([True, True, True, False])),
    )


KINDS = ("all", "all", "all", "off", *WINDOWS)  # whole requests are half of them
ADDS = [Add(*facts) for facts in product(range(8), LENGTHS, OWN_LENGTHS, "ab", (1, 3, MAX_OUTPUT), KINDS)]
COMPUTES = [Compute(*facts) for facts in product(ORDERS, range(MAX_DRAFTS + 1))]
RARE = [*map(Preempt, range(5)), *map(Abort, range(3)), SwitchCapture(False), SwitchCapture(True), SwitchCapture(True)]
# One choice of a long list for each action: drawing its fields one by one takes most of the test's time.
ACTIONS: st.SearchStrategy[Action] = st.one_of(
    st.sampled_from(COMPUTES),
    st.sampled_from(COMPUTES),
    st.sampled_from(ADDS),
    st.sampled_from(ADDS),
    st.sampled_from(RARE),
)
ACTION_LISTS = st.integers(1, 80).flatmap(lambda length: st.lists(ACTIONS, min_size=length, max_size=length))
STREAMS = st.builds(Stream, setups(), ACTION_LISTS, st.booleans())


@settings(max_examples=NUM_EXAMPLES, deadline=None)
@given(STREAMS)
def test_any_stream_of_steps_gives_every_position_the_state_computed_for_it(stream: Stream) -> None:
    """CASES 5 and 8 among them: each buffer has three rows of graph padding behind those of the step."""
    play(stream)


def test_a_step_without_tokens_is_accounted_for() -> None:
    """CaptureSession does not plan one. Nobody who does should see the batch of the step before."""
    book = RowBook(block_size=4, num_slots=64)
    book.plan(Step((NewRequest("a", 0, (1,), WHOLE),), {}, {}, {"a": 4}, ("a",)))
    book.forget("a")
    plan = book.plan(Step((), {}, {}, {}, ()))
    assert (plan.count, plan.first_row) == (0, 4)


PLAIN = Setup(
    block_size=4,
    hash_size=4,
    num_blocks=32,
    budget=64,
    drafts=0,
    depth=1,
    runner="V1",
    full_attention=True,
)
FIRST, SECOND = Add(0, 8, 0, "a", 2, "all"), Add(0, 4, 0, "a", 9, "all")


def run_first_to_its_end() -> tuple[Scheduler, Worker]:
    scheduler, worker = open_engine(PLAIN, RowBook)
    scheduler.add(make_request(FIRST, "r0"))
    apply(Compute("as scheduled", 0), scheduler, worker)
    apply(Compute("as scheduled", 0), scheduler, worker)
    return scheduler, worker


def test_an_id_used_again_and_aborted_before_the_next_step() -> None:
    """The record of the first must not have the length and the reason of the second."""
    scheduler, worker = run_first_to_its_end()
    second = make_request(SECOND, "r0")
    scheduler.add(second)
    scheduler.finish(second, "abort")
    apply(Compute("as scheduled", 0), scheduler, worker)


def test_an_id_used_again_is_under_way_when_the_engine_closes() -> None:
    """The second, which has not ended, must not get a record with the length of the first."""
    scheduler, worker = run_first_to_its_end()
    scheduler.add(make_request(SECOND, "r0"))
    apply(Compute("as scheduled", 0), scheduler, worker)
    close(scheduler, worker)


class KnowsWindows(RowBook):
    """No fault: a book that remembers each request's window, for faults of certain positions."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._windows: dict[str, Window] = {}

    def plan(self, step: Step) -> Plan:
        self._windows.update({new.key: new.window for new in step.new if not new.resumed})
        return super().plan(step)


class IgnoresOrderOfBatch(RowBook):
    """Numbers rows in the order of scheduling, whatever their order in the buffer."""

    def plan(self, step: Step) -> Plan:
        return super().plan(replace(step, order=tuple(step.scheduled)))


class OneTooHighAfterReorder(RowBook):
    """Every row of a request that was once computed in a re-ordered batch is the next one."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._moved: set[str] = set()

    def plan(self, step: Step) -> Plan:
        if step.order != tuple(step.scheduled):
            self._moved.update(step.order)
        return super().plan(step)

    def find_rows(self, key: str, num_positions: int) -> Rows:
        rows = super().find_rows(key, num_positions)
        return np.where((rows != MISSING) & (key in self._moved), rows + 1, rows)


class SlotOfPositionBefore(KnowsWindows):
    """Reads the rows of a cached prefix one slot too low."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._cached: dict[str, int] = {}

    def plan(self, step: Step) -> Plan:
        self._cached.update({new.key: new.num_computed_tokens for new in step.new if not new.resumed})
        return super().plan(step)

    def find_rows(self, key: str, num_positions: int) -> Rows:
        rows = super().find_rows(key, num_positions)
        end = max(0, min(self._cached[key] - self._windows[key].start, len(rows)))
        rows[1:end] = rows[: max(0, end - 1)].copy()
        return rows


class KeepsSupersededRow(KnowsWindows):
    """The first row of a position stays when a draft there was rejected and the position is computed again."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._first: dict[tuple[str, int], int] = {}

    def plan(self, step: Step) -> Plan:
        for key, start in step.starts.items():
            before = self.find_rows(key, start + 1)[max(0, start - self._windows[key].start) :]
            if start in range(*self._windows[key]) and before[0] != MISSING:
                self._first[key, start] = int(before[0])
        return super().plan(step)

    def find_rows(self, key: str, num_positions: int) -> Rows:
        rows = super().find_rows(key, num_positions)
        positions = range(self._windows[key].start, WHOLE.end)
        return np.array(
            [self._first.get((key, p), row) for p, row in zip(positions, rows, strict=False)], dtype=np.int64
        )

    def forget(self, key: str) -> None:
        super().forget(key)
        self._first = {place: row for place, row in self._first.items() if place[0] != key}


class ForgetsAtResumption(KnowsWindows):
    """A resumed request begins as if it were new, without its rows of before."""

    def plan(self, step: Step) -> Plan:
        return super().plan(replace(step, new=tuple(self._begin_anew(new) for new in step.new)))

    def _begin_anew(self, new: NewRequest) -> NewRequest:
        if not new.resumed:
            return new
        self.forget(new.key)
        return replace(new, window=self._windows[new.key], resumed=False)


class IgnoresCopies(RowBook):
    """A copied block keeps the rows of what it held before."""

    def plan(self, step: Step) -> Plan:
        return super().plan(replace(step, copies=()))


class KeepsRowsUnderUncaptured(RowBook):
    """A block filled by an uncaptured request still stands for the rows of what it held before."""

    def plan(self, step: Step) -> Plan:
        new = tuple(
            each if self._captures(each) else replace(each, blocks=(0,) * len(each.blocks)) for each in step.new
        )
        more = {
            key: blocks if self.is_captured(key) else (0,) * len(blocks) for key, blocks in step.more_blocks.items()
        }
        return super().plan(replace(step, new=new, more_blocks=more))

    def _captures(self, new: NewRequest) -> bool:
        return self.is_captured(new.key) if new.resumed else new.window != NOTHING


class IgnoresHolesInBuffer(RowBook):
    """Takes the first rows of the buffer, although rows of uncaptured requests are among them."""

    def plan(self, step: Step) -> Plan:
        return replace(super().plan(step), indices=None)


class BeginsWindowOneTooLate(RowBook):
    """The first position of a window that begins behind the request's is not written."""

    def plan(self, step: Step) -> Plan:
        return super().plan(replace(step, new=tuple(self._narrow(new) for new in step.new)))

    def _narrow(self, new: NewRequest) -> NewRequest:
        start, end = new.window
        return replace(new, window=Window(start + 1, end)) if start else new


class EndsWindowOneTooLate(RowBook):
    """The position behind a window is written too."""

    def plan(self, step: Step) -> Plan:
        return super().plan(replace(step, new=tuple(self._widen(new) for new in step.new)))

    def _widen(self, new: NewRequest) -> NewRequest:
        return replace(new, window=Window(new.window.start, new.window.end + 1)) if new.window != NOTHING else new


class TakesFirstRowsOfRequest(RowBook):
    """Takes as many rows out of the buffer as there are to write, from where the request begins and not its window."""

    def plan(self, step: Step) -> Plan:
        plan = super().plan(step)
        if plan.indices is None:
            return plan
        counts = [step.scheduled[key] for key in step.order]
        begins = np.cumsum(counts) - counts
        taken = [begin + n for begin, kept in zip(begins, plan.lengths, strict=True) for n in range(kept)]
        return replace(plan, indices=np.array(taken, dtype=np.int64))


class CountsWindowFromRequest(KnowsWindows):
    """Takes as many rows for a window as its last position says, as if it began with the request."""

    def find_rows(self, key: str, num_positions: int) -> Rows:
        return super().find_rows(key, num_positions + self._windows[key].start)


class KeepsRowsAroundWindow(RowBook):
    """A slot filled by a position outside of its request's window still stands for the row of what it held before."""

    def plan(self, step: Step) -> Plan:
        before = self._slot_rows.copy()
        plan = super().plan(step)
        self._slot_rows = np.where(self._slot_rows == MISSING, before, self._slot_rows)
        return plan


PLANTED = [
    IgnoresOrderOfBatch,
    OneTooHighAfterReorder,
    SlotOfPositionBefore,
    KeepsSupersededRow,
    ForgetsAtResumption,
    IgnoresCopies,
    KeepsRowsUnderUncaptured,
    IgnoresHolesInBuffer,
    BeginsWindowOneTooLate,
    EndsWindowOneTooLate,
    TakesFirstRowsOfRequest,
    CountsWindowFromRequest,
    KeepsRowsAroundWindow,
]


def goes_wrong(stream: Stream, make_book: Callable[..., RowBook]) -> bool:
    try:
        play(stream, make_book)
    except AssertionError:
        return True
    return False


@pytest.mark.parametrize("fault", PLANTED)
def test_the_same_search_finds_a_planted_fault(fault: type[RowBook]) -> None:
    """Planted in the step that a RowBook is given, in what it answers or in its slots. `find` raises if it fails."""
    search = settings(max_examples=NUM_EXAMPLES, deadline=None, database=None, phases=[Phase.generate])
    find(STREAMS, lambda stream: goes_wrong(stream, fault), settings=search)
