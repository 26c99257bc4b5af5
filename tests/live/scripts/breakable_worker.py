"""A user's own worker extension (`worker_extension_cls`): it looks around in its process, and can be told to fail."""

from __future__ import annotations

import os
import signal
from typing import Any, NoReturn

from traces import find_traces

MESSAGE = "boom-17"


class BreakableWorker:
    model_runner: Any
    rank: int

    def find_traces(self) -> list[str]:
        """What of the overlay is in this worker's process."""
        return find_traces()

    def break_steps(self) -> None:
        """From now on every step of this worker fails."""

        def fail(*args: object, **kwargs: object) -> NoReturn:
            raise ValueError(MESSAGE)

        self.model_runner.execute_model = fail

    def kill_rank(self, rank: int, after: int) -> None:
        """The worker of this rank kills itself in the step after so many more."""
        if self.rank != rank:
            return
        execute, steps = self.model_runner.execute_model, iter(range(after))

        def execute_or_die(*args: Any, **kwargs: Any) -> Any:
            if next(steps, None) is None:
                os.kill(os.getpid(), signal.SIGKILL)
            return execute(*args, **kwargs)

        self.model_runner.execute_model = execute_or_die
