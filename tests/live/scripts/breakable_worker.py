"""A user's own worker extension (`worker_extension_cls`): it looks around in its process, and can be told to fail."""

from __future__ import annotations

from typing import Any, NoReturn

from traces import find_traces

MESSAGE = "boom-17"


class BreakableWorker:
    model_runner: Any

    def find_traces(self) -> list[str]:
        """What of the overlay is in this worker's process."""
        return find_traces()

    def break_steps(self) -> None:
        """From now on every step of this worker fails."""

        def fail(*args: object, **kwargs: object) -> NoReturn:
            raise ValueError(MESSAGE)

        self.model_runner.execute_model = fail
