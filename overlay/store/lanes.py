"""Threads that write and hash the pieces of one append side by side; neither holds the interpreter's lock.

One thread writes 2 GB/s into a tmpfs, whose files take one writer at a time, and hashes 3 GB/s: a tensor-parallel
engine makes more rows than that.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

# Of a GPU host's 16 cores: tools/append_cost.py measures what 8 and 12 take. An engine has other work for the rest.
MOST_LANES = 12

Task = Callable[[], Any]
# The number of a task, what it returned, and its error.
Ended = tuple[int, Any, BaseException | None]


class Lanes:
    """Threads of our own, because those of concurrent.futures take nothing more once the interpreter is about to end,
    and a last flush may come then. Used by one thread at a time."""

    def __init__(self) -> None:
        self._inbox: queue.SimpleQueue[tuple[int, Task, queue.SimpleQueue[Ended]] | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, name=f"vllm-overlay-lane-{number}", daemon=True)
            for number in range(min(MOST_LANES, os.cpu_count() or 1))
        ]
        for thread in self._threads:
            thread.start()

    def run(self, tasks: Sequence[Task]) -> list[Any]:
        """What the tasks return, in their order, when all have ended. Errors: that of the first one that failed."""
        outbox: queue.SimpleQueue[Ended] = queue.SimpleQueue()
        for number, task in enumerate(tasks):
            self._inbox.put((number, task, outbox))
        ended = sorted((outbox.get() for _ in tasks), key=lambda one: one[0])
        for _, _, error in ended:
            if error is not None:
                raise error
        return [result for _, result, _ in ended]

    def stop(self) -> None:
        """End the threads."""
        for _ in self._threads:
            self._inbox.put(None)
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while (task := self._inbox.get()) is not None:
            number, call, outbox = task
            try:
                outbox.put((number, call(), None))
            except BaseException as error:  # noqa: BLE001 - raised by `run`, in the thread that writes
                outbox.put((number, None, error))
