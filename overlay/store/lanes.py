"""Threads that write, hash and sync pieces of a log side by side; none of that holds the interpreter's lock.

One thread writes 2 GB/s into a tmpfs, whose files take one writer at a time, and hashes 3 GB/s: a tensor-parallel
engine makes more rows than that.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import Any

# Of a GPU host's 16 cores: tools/append_cost.py measures what 8 and 12 take. An engine has other work for the rest.
MOST_LANES = 12

Task = Callable[[], Any]


class Lanes:
    """Threads of our own, because those of concurrent.futures take nothing more once the interpreter is about to end,
    and a last flush may come then."""

    def __init__(self, count: int) -> None:
        self._inbox: queue.SimpleQueue[tuple[Task, Future[Any]] | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, name=f"vllm-overlay-lane-{number}", daemon=True)
            for number in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def start(self, task: Task) -> Future[Any]:
        """Have a thread do this as soon as one is free."""
        future: Future[Any] = Future()
        self._inbox.put((task, future))
        return future

    def run(self, tasks: Sequence[Task]) -> list[Any]:
        """What the tasks return, in their order, when all have ended. Errors: that of the first one that failed."""
        futures = [self.start(task) for task in tasks]
        wait(futures)
        return [future.result() for future in futures]

    def stop(self) -> None:
        """End the threads, when they have done what was started."""
        for _ in self._threads:
            self._inbox.put(None)
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while (given := self._inbox.get()) is not None:
            task, future = given
            try:
                future.set_result(task())
            except BaseException as error:  # noqa: BLE001 - raised where the result is asked for
                future.set_exception(error)
