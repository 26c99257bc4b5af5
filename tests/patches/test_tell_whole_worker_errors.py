"""What a worker answers when a call failed, and when it did not."""

from __future__ import annotations

from typing import Any

import pytest

from tests.patches.conftest import Apply
from vllm_overlay.patches.tell_whole_worker_errors import PATCH


@pytest.fixture
def answer(apply: Apply) -> Any:
    """A function from a worker's output to what its executor gets: (status, result)."""
    from vllm.v1.executor.multiproc_executor import WorkerProc

    class Queue:
        def enqueue(self, result: Any) -> None:
            self.result = result

    apply(PATCH)
    process = WorkerProc.__new__(WorkerProc)
    process.rank, process.worker_response_mq = 1, Queue()

    def ask(output: Any) -> tuple[str, Any]:
        process.enqueue_output(output)
        status, result = process.worker_response_mq.result
        return status.name, result

    return ask


def test_a_bare_assert(answer: Any) -> None:
    """CASES 22."""
    try:
        raise AssertionError
    except AssertionError as error:
        status, text = answer(error)
    assert status == "FAILURE"
    assert text.startswith("AssertionError: (no message) (rank 1, worker process ")
    assert f'file "{__file__}", line ' in text.partition("\n")[0]
    assert "\nTraceback (most recent call last):\n" in text


def test_an_output_goes_through(answer: Any) -> None:
    output = object()
    assert answer(output) == ("SUCCESS", output)


def make_output(result: Any) -> Any:
    from vllm.v1.outputs import AsyncModelRunnerOutput

    class Output(AsyncModelRunnerOutput):  # type: ignore[misc]
        def get_output(self) -> Any:
            if isinstance(result, Exception):
                raise result
            return result

    return Output()


def test_an_output_that_is_still_on_the_device(answer: Any) -> None:
    assert answer(make_output("finished")) == ("SUCCESS", "finished")


def test_an_output_that_cannot_be_had(answer: Any) -> None:
    """It must be answered: through 0.24 the thread that hands outputs over ended with it."""
    status, text = answer(make_output(ValueError("boom-17")))
    assert status == "FAILURE"
    assert text.startswith("ValueError: boom-17 (rank 1, ")
