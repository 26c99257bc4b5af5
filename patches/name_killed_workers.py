"""A worker that was killed is named: its rank, its process and the signal.

Why: it wrote nothing down, and vLLM's monitor says in the log alone that it died (from 0.26 on with its exit code).
What callers get is the error of another rank whose connection to it broke, or none. What it does not change: who ends
the engine, and when.
"""

from __future__ import annotations

import multiprocessing.connection
import os
import signal
import time
from collections.abc import Sequence
from typing import Any

import wrapt

from vllm_overlay.failures import Failure, note, read_failures
from vllm_overlay.patch import Patch

# A dying process closes its pipe, at which vLLM looks, before the kernel says how it ended. Of a worker with a GPU's
# memory to give back nothing was known yet (0.24.0, two H200s).
LAST_SECONDS = 20.0


def describe_killed(rank: int, process_id: int, exit_status: int | None, time_ns: int) -> Failure:
    """`exit_status` is multiprocessing's: the negative number of a signal, None of a process that is not over yet."""
    how = f"ended with exit status {exit_status}"
    if exit_status is None:
        how = "is ending, and how is not known yet"
    elif exit_status < 0:
        how = f"was killed by {name_signal(-exit_status)}"
    if exit_status == -signal.SIGKILL:
        how += "; if nobody did, the system was out of memory, and its log says so"
    message = f"the worker {how}"
    return Failure(
        type="WorkerDied",
        message=message,
        rank=rank,
        process="worker",
        process_id=process_id,
        engine_id=os.getpid(),
        file="",
        line=0,
        function="",
        code="",
        traceback=f"It had no time for a traceback. {message[0].upper()}{message[1:]}.",
        time_ns=time_ns,
    )


def name_signal(number: int) -> str:
    """Real-time signals have no name but for the first and the last one."""
    names = {one.value: one.name for one in signal.Signals}
    return names.get(number, f"signal {number}")


def build(original: Any) -> Any:
    def note_and_shut_down(wrapped: Any, executor: Any, args: Any, kwargs: Any) -> Any:
        if executor.is_failed and not getattr(executor, "shutting_down", False):
            note_killed(executor)
        return wrapped(*args, **kwargs)

    return wrapt.FunctionWrapper(original, note_and_shut_down)


def note_killed(executor: Any) -> None:
    """Those that are dead and said nothing themselves.

    At once, because the engine may be asked, and answer, before it is known how they ended; then again, in the place of
    what was written first. No `join`: once the pipe is closed, multiprocessing's waits without an end.
    """
    workers = {worker.proc.sentinel: worker for worker in executor.workers}
    dead = [workers[sentinel] for sentinel in multiprocessing.connection.wait(list(workers), timeout=0)]
    others = read_failures({os.getpid()})
    told = {other.process_id for other in others}
    silent = [worker for worker in dead if worker.proc.pid not in told]
    # Before the others: their connections to it broke at once, and they may have said so before vLLM looked.
    time_ns = min([time.time_ns(), *(other.time_ns - 1 for other in others)])
    note_all(silent, time_ns)
    until = time.monotonic() + LAST_SECONDS
    while any(worker.proc.exitcode is None for worker in silent) and time.monotonic() < until:
        time.sleep(0.02)
    note_all(silent, time_ns)


def note_all(workers: Sequence[Any], time_ns: int) -> None:
    for worker in workers:
        note(describe_killed(worker.rank, worker.proc.pid, worker.proc.exitcode, time_ns))


def verify() -> None:
    import dataclasses

    from vllm.v1.executor.multiproc_executor import WorkerProcHandle

    found = {field.name for field in dataclasses.fields(WorkerProcHandle)}
    if not {"proc", "rank"} <= found:
        raise RuntimeError(f"expected WorkerProcHandle to have proc and rank, found {sorted(found)}")


PATCH = Patch(
    name="name_killed_workers",
    targets=("{MULTIPROC_EXECUTOR}:MultiprocExecutor.shutdown",),
    vllm=">=0.11",
    process="any",
    relies_on={},
    upstream="none",
    remove_when="vLLM's EngineDeadError names the worker that died and how",
    build=build,
    verify=verify,
)
