"""vLLM's own executor, without its start, over real processes that are killed or end."""

from __future__ import annotations

import multiprocessing.connection
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.patches.conftest import Apply
from vllm_overlay import failures
from vllm_overlay.patches.name_killed_workers import PATCH
from vllm_overlay.shared_folder import FOLDER_VARIABLE

KILLED = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
ABORTED = "import os, signal; os.kill(os.getpid(), signal.SIGABRT)"
NAMELESS = "import os, signal; os.kill(os.getpid(), signal.SIGRTMIN + 3)"
WAITING = "import time; time.sleep(600)"
# As with a GPU's memory to give back: the pipe is closed, and the process is there for a while.
DYING = (
    "import os, signal, sys, time; os.close(int(sys.argv[1])); time.sleep(1.5); os.kill(os.getpid(), signal.SIGKILL)"
)
LINGERING = "import os, sys, time; os.close(int(sys.argv[1])); time.sleep(600)"


class Process:
    """What the executor asks of a multiprocessing process."""

    def __init__(self, program: str) -> None:
        self.sentinel, held = os.pipe()
        command = [sys.executable, "-c", program, str(held)]
        self._process = subprocess.Popen(command, stderr=subprocess.DEVNULL, pass_fds=[held])
        os.close(held)
        self.pid = self._process.pid
        if program != WAITING:
            multiprocessing.connection.wait([self.sentinel])

    @property
    def exitcode(self) -> int | None:
        return self._process.poll()

    def is_alive(self) -> bool:
        return self.exitcode is None

    def terminate(self) -> None:
        self._process.terminate()

    kill = terminate

    def join(self, timeout: float | None = None) -> None:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout)


@pytest.fixture
def shut_down(apply: Apply, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Shuts vLLM's executor down over processes, one a rank; gives the processes."""
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    apply(PATCH)

    def shut_down_over(*programs: str, is_failed: bool = True) -> list[Process]:
        executor = MultiprocExecutor.__new__(MultiprocExecutor)
        processes = [Process(program) for program in programs]
        executor.workers = [
            SimpleNamespace(rank=rank, proc=process, death_writer=None, worker_response_mq=None)
            for rank, process in enumerate(processes)
        ]
        executor.is_failed = is_failed
        executor.rpc_broadcast_mq = None
        # 0.11.0 and 0.11.1 to 0.19 set it, 0.11.0 has the pool.
        executor.shutdown_event = SimpleNamespace(set=lambda: None)
        executor.io_thread_pool = None
        executor.shutdown()
        executor.shutdown()
        return processes

    return shut_down_over


def test_the_killed_rank_is_named_and_those_that_live_are_not(shut_down: Any) -> None:
    _, killed = shut_down(WAITING, KILLED)
    (failure,) = failures.read_failures({os.getpid()})
    assert (failure.type, failure.rank, failure.process_id) == ("WorkerDied", 1, killed.pid)
    assert failure.headline.startswith("WorkerDied: the worker was killed by SIGKILL; if nobody did")
    assert failure.headline.endswith(f"(rank 1, worker process {killed.pid})")


def test_a_worker_that_takes_its_time_to_die_is_waited_for(shut_down: Any) -> None:
    shut_down(WAITING, DYING)
    (failure,) = failures.read_failures({os.getpid()})
    assert failure.headline.startswith("WorkerDied: the worker was killed by SIGKILL")


def test_one_that_does_not_die_in_time_is_named_too(shut_down: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_overlay.patches.name_killed_workers.LAST_SECONDS", 0.2)
    shut_down(LINGERING)
    (failure,) = failures.read_failures({os.getpid()})
    assert failure.headline.startswith("WorkerDied: the worker is ending, and how is not known yet (rank 0")


def test_who_asks_while_a_worker_dies_hears_of_it(shut_down: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[str] = []

    def sleep_and_ask(seconds: float) -> None:
        heard.extend(one.headline for one in failures.read_failures({os.getpid()}))
        sleep(seconds)

    sleep = time.sleep
    monkeypatch.setattr("vllm_overlay.patches.name_killed_workers.time.sleep", sleep_and_ask)
    shut_down(DYING)
    assert heard[0].startswith("WorkerDied: the worker is ending, and how is not known yet (rank 0")


def test_other_ends_are_told_without_a_guess(shut_down: Any) -> None:
    shut_down(ABORTED, "raise SystemExit(3)", "", NAMELESS)
    told = {one.rank: one.message for one in failures.read_failures({os.getpid()})}
    assert told == {
        0: "the worker was killed by SIGABRT",
        1: "the worker ended with exit status 3",
        2: "the worker ended with exit status 0",
        3: f"the worker was killed by signal {signal.SIGRTMIN + 3}",
    }


def test_it_comes_before_the_errors_of_the_others(shut_down: Any) -> None:
    """gloo tells rank 0 that its peer closed the connection before vLLM has looked."""
    failures.note(failures.describe(RuntimeError("Connection closed by peer"), "engine", 0))
    shut_down(WAITING, KILLED)
    assert [one.type for one in failures.read_failures({os.getpid()})] == ["WorkerDied", "RuntimeError"]


def test_what_wrote_its_own_failure_down_is_not_told_again(shut_down: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that ends by `end_silent_workers`."""
    written = failures.describe(ValueError("boom-17"), "worker", 0)

    def end_and_write(self: Process, program: str) -> None:
        start(self, program)
        failures.note(replace(written, process_id=self.pid, engine_id=os.getpid()))

    start = Process.__init__
    monkeypatch.setattr(Process, "__init__", end_and_write)
    shut_down("raise SystemExit(1)")
    assert [one.type for one in failures.read_failures({os.getpid()})] == ["ValueError"]


def test_an_engine_that_is_shut_down_on_purpose_has_nothing_to_tell(shut_down: Any) -> None:
    shut_down(KILLED, is_failed=False)
    assert failures.read_failures({os.getpid()}) == []
