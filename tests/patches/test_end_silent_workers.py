"""vLLM's own loop of a worker's process, fed with calls here."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.patches.conftest import Apply
from vllm_overlay import failures
from vllm_overlay.patches.end_silent_workers import PATCH
from vllm_overlay.shared_folder import FOLDER_VARIABLE

RANK = 1


class NoMoreCalls(Exception):
    pass


class Queue:
    def __init__(self, calls: list[Any]) -> None:
        self.calls = calls

    def dequeue(self, *args: Any, **kwargs: Any) -> Any:
        if not self.calls:
            raise NoMoreCalls
        return self.calls.pop(0)


class Worker:
    kind = "worker"
    seen: str = ""

    def good(self, value: str) -> str:
        self.seen = value
        return value

    def bad(self) -> None:
        raise ValueError("boom-17")


def look_around(worker: Any) -> str:
    """A function that is called on the worker, as `collective_rpc` takes one."""
    worker.kind = "changed"
    return str(worker.seen)


@pytest.fixture
def run(apply: Apply, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs calls through a worker's loop until there are none; gives the worker and its answers."""
    from vllm.v1.executor.multiproc_executor import WorkerProc

    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    apply(PATCH)

    def run_calls(*calls: Any) -> tuple[Worker, list[Any]]:
        process, worker, answers = WorkerProc.__new__(WorkerProc), Worker(), []
        process.rank, process.worker, process.rpc_broadcast_mq = RANK, worker, Queue(list(calls))
        process.mm_receiver_cache = None
        process.handle_output = answers.append
        with pytest.raises(NoMoreCalls):
            process.worker_busy_loop()
        return worker, answers

    return run_calls


def test_a_rank_that_does_not_answer_writes_and_ends(run: Any) -> None:
    """CASES 21, in rank 1 only."""
    with pytest.raises(SystemExit) as ended:
        run(("bad", (), {}, 0), ("good", ("never",), {}, None))
    assert ended.value.code == 1
    (failure,) = failures.read_failures({os.getpid()})
    assert (failure.type, failure.message, failure.rank, failure.process) == ("ValueError", "boom-17", 1, "worker")
    assert failure.file == __file__


@pytest.mark.parametrize("answers", [None, RANK])
def test_a_rank_that_answers_replies_and_goes_on(run: Any, answers: int | None) -> None:
    _, replies = run(("bad", (), {}, answers), ("good", ("next",), {}, answers))
    assert [str(reply) for reply in replies] == ["boom-17", "next"]
    assert failures.read_failures({os.getpid()}) == []


def test_calls_that_succeed(run: Any) -> None:
    _, replies = run(("good", ("silent",), {}, 0), ("good", ("heard",), {}, RANK))
    assert replies == ["heard"]


def test_a_function_finds_the_worker_itself(run: Any) -> None:
    import cloudpickle  # type: ignore[import-untyped]

    worker, replies = run(("good", ("set",), {}, 0), (cloudpickle.dumps(look_around), (), {}, None))
    assert replies == ["set"]
    assert worker.kind == "changed"
