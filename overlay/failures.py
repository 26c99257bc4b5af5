"""What went wrong in a process of vLLM, as plain text that reaches the processes above it.

vLLM hands an exception on as `str(error)` or only as the news that a process ended. Here every engine and worker
process that an exception ends writes what happened into the run's shared folder first, one file a failure; whoever
raises an error about that process looks there.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import multiprocessing
import os
import time
import traceback
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal
from weakref import WeakKeyDictionary

from vllm_overlay.shared_folder import find_folder

Process = Literal["engine", "worker"]

# By manager of engine processes: their ids.
_ENGINES: WeakKeyDictionary[Any, tuple[int, ...]] = WeakKeyDictionary()
# The rank of the worker that was made last in this process, if one was.
_RANKS: list[int] = []
_LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True)
class Failure:
    """One exception. `file`, `line`, `function` and `code` are where it was raised, empty if nobody knows.

    `rank` is None in a process that runs no worker. `engine_id` is the id of the engine's process,
    `process_id` itself in an engine. `time_ns` is the wall clock's; the processes run on one machine.
    """

    type: str
    message: str
    rank: int | None
    process: Process
    process_id: int
    engine_id: int
    file: str
    line: int
    function: str
    code: str
    traceback: str
    time_ns: int

    @property
    def headline(self) -> str:
        """Type, message (its first line), rank, process, file and line, on one line."""
        first_line = self.message.strip().partition("\n")[0] or "(no message)"
        who = f"{self.process} process {self.process_id}"
        rank = "" if self.rank is None else f"rank {self.rank}, "
        place = f', file "{self.file}", line {self.line}, in {self.function}: {self.code}' if self.file else ""
        return f"{self.type}: {first_line} ({rank}{who}{place})"

    @property
    def text(self) -> str:
        """The headline and the traceback, which ends with the whole message."""
        return f"{self.headline}\n{self.traceback.rstrip()}"


def describe(error: BaseException, process: Process, rank: int | None) -> Failure:
    """The facts of an exception that was caught in this process."""
    frames = traceback.extract_tb(error.__traceback__)
    place = frames[-1] if frames else traceback.FrameSummary("", 0, "")
    parent = multiprocessing.parent_process()
    own = os.getpid()
    return Failure(
        type=type(error).__name__,
        message=_read_message(error),
        rank=rank,
        process=process,
        process_id=own,
        engine_id=parent.pid or own if process == "worker" and parent is not None else own,
        file=place.filename,
        line=place.lineno or 0,
        function=place.name,
        code=place.line or "",
        traceback=_write_traceback(error),
        time_ns=time.time_ns(),
    )


def _read_message(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as unreadable:  # noqa: BLE001  the class is a stranger's, and the first error must get through
        return f"(its message cannot be read: {type(unreadable).__name__})"


def _write_traceback(error: BaseException) -> str:
    written = traceback.TracebackException.from_exception(error)
    # vLLM's worker loop adds the traceback to the exception as a note: it would be here twice.
    notes = [note for note in getattr(error, "__notes__", ()) if not str(note).startswith("Traceback (most recent")]
    written.__notes__ = notes or None  # type: ignore[attr-defined]
    return "".join(written.format())


def note(failure: Failure) -> None:
    """Write a failure where the processes above look; nowhere in a process that was started by none of ours.

    A folder that cannot be written to is logged: an error of ours must not take the place of the one to report.
    """
    folder = find_folder()
    if folder is None:
        return
    name = f"{failure.time_ns:020d}-{failure.process_id}"
    draft = folder / f".{name}"
    try:
        draft.write_text(json.dumps(dataclasses.asdict(failure)), encoding="utf-8")
        draft.rename(folder / f"{name}.json")
    except OSError as error:
        _LOGGER.error("vllm-overlay: %s; not passed on: %s", error, failure.text)


def read_failures(process_ids: Collection[int]) -> list[Failure]:
    """The failures of these processes and of the workers of these engines, the first first."""
    folder = find_folder()
    files = sorted(folder.glob("*.json")) if folder else []
    failures = [Failure(**json.loads(file.read_text(encoding="utf-8"))) for file in files]
    return [one for one in failures if one.process_id in process_ids or one.engine_id in process_ids]


def note_rank(rank: int) -> None:
    """A worker of this rank was made in this process."""
    _RANKS[:] = [rank]


def rank_of_this_process() -> int | None:
    """The rank of the worker that lives in this process, None if there is none."""
    return _RANKS[0] if _RANKS else None


def note_engines(manager: Any, process_ids: Iterable[int]) -> None:
    """These engines were started by this process; `manager` lives as long as somebody uses them."""
    _ENGINES[manager] = tuple(process_ids)


def read_failures_of_newest_engines() -> list[Failure]:
    """The failures of the engines that this process started last: those that start, where one does."""
    managed = list(_ENGINES.values())
    return read_failures(managed[-1]) if managed else []


def read_failures_of_last_engine() -> list[Failure]:
    """The failures of that engine of this process that failed last."""
    failures = read_failures({process_id for ids in _ENGINES.values() for process_id in ids})
    return [one for one in failures if one.engine_id == failures[-1].engine_id]


def add_failures(error: Exception, failures: Sequence[Failure]) -> None:
    """Add to an exception's message the first failure whole, and the headlines of those that followed from it."""
    if not failures:
        return
    first, *others = failures
    lines = [f"vllm-overlay: what failed first: {first.text}", *(f"then: {one.headline}" for one in others)]
    message = error.args[0] if error.args else ""
    error.args = ("\n".join([str(message), *lines]), *error.args[1:])
