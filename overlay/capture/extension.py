"""The worker extension: how vLLM's worker and `collective_rpc` reach the capture session.

vLLM adds this class to the bases of its worker class (`worker_extension_cls`), so `self` is the worker. Names carry
the prefix `overlay_` because vLLM refuses an extension that shares a name with its worker. Methods take and return
plain values, so that nothing is ever pickled by us.
"""

from __future__ import annotations

import multiprocessing.util
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from vllm_overlay.activation import ActivationError, describe_process, note_role, require_patched
from vllm_overlay.capture.finished import noted_in_this_process

if TYPE_CHECKING:
    from vllm_overlay.capture.session import Bystander, CaptureSession

EXTENSION = "vllm_overlay.capture.extension.CaptureExtension"
COMPOSED = "vllm_overlay.capture.composed."


class CaptureExtension:
    """Methods of a worker that captures."""

    overlay_session: CaptureSession | Bystander | None = None
    overlay_finalizer: multiprocessing.util.Finalize | None = None
    overlay_is_paused = False

    def overlay_open(self) -> None:
        """Open the session before the weights are read. Errors: ActivationError, CaptureError, StoreError."""
        # Not before: `check` reads the patches, which name this class, and takes a fraction of torch's import.
        from vllm_overlay.capture.session import open_session

        if not isinstance(self, CaptureExtension):
            raise ActivationError(
                f"vllm-overlay: expected {EXTENSION} among the bases of {type(self).__name__}, found none: the process "
                "that made the engine's configuration was not patched"
            )
        note_role("worker")
        require_patched("worker")
        self.overlay_session = open_session(self)
        # A worker that is told to stop by a signal skips the engine's orderly end; this runs at every exit but a kill.
        self.overlay_finalizer = multiprocessing.util.Finalize(self, self.overlay_close, exitpriority=100)

    def overlay_tap(self) -> None:
        """Tap the model that has just been built."""
        self._overlay_require().install_taps(self)

    def overlay_before_step(self, scheduler_output: Any) -> None:
        """Called before the model runs."""
        if self.overlay_session is None:
            return
        self.overlay_session.prepare_step(scheduler_output)
        if not self.overlay_is_paused:
            # Not after the step: one that fails ends the engine, and nobody else may be left to tell of them.
            self.overlay_session.hear_of_ended(scheduler_output)

    def overlay_after_step(self, scheduler_output: Any) -> None:
        """Called when the model has run."""
        if self.overlay_session is not None and not self.overlay_is_paused:
            self.overlay_session.record_step(self, scheduler_output)

    @contextmanager
    def overlay_paused(self) -> Iterator[None]:
        """Steps taken inside are not recorded: they come from no scheduler."""
        self.overlay_is_paused = True
        try:
            yield
        finally:
            self.overlay_is_paused = False

    def overlay_flush(self) -> dict[str, int]:
        """Commit every finished request; returns the statistics. Errors: CaptureError."""
        session = self._overlay_require()
        session.flush()
        return session.statistics()

    def overlay_statistics(self) -> dict[str, int]:
        """Counts of rows, bytes, records, incomplete records, live requests, backlog and waits."""
        return self._overlay_require().statistics()

    def overlay_ledger(self) -> dict[str, Any]:
        """What is patched in this process."""
        return describe_process()

    def overlay_start(self) -> None:
        """Capture the requests that begin from now on."""
        self._overlay_require().start()

    def overlay_stop(self) -> None:
        """Do not capture the requests that begin from now on."""
        self._overlay_require().stop()

    def overlay_close(self, ended: list[tuple[str, int, str, int]] | None = None) -> None:
        """Write the last records (key, tokens, reason, serial) and close the store. Closing twice is closing once.

        Without a list, what the engine noted in this very process: an engine that runs in its caller's process ends
        with it, and nobody tells its worker.
        """
        if self.overlay_session is None:
            return
        try:
            self.overlay_session.close(noted_in_this_process() if ended is None else ended)
        except Exception:
            self._overlay_let_go()
            raise
        # Not when vLLM's handler of SIGTERM raised SystemExit meanwhile: then the finalizer closes what is left.
        self._overlay_let_go()

    def _overlay_let_go(self) -> None:
        self.overlay_session = None
        if self.overlay_finalizer is not None:
            self.overlay_finalizer.cancel()

    def _overlay_require(self) -> CaptureSession | Bystander:
        if self.overlay_session is None:
            raise ActivationError("vllm-overlay: this worker's capture session is closed")
        return self.overlay_session


def compose_extension(users: str) -> str:
    """The extension class to install where the user named `users` (empty for none), as a qualified name."""
    if users in ("", EXTENSION):
        return EXTENSION
    if users.startswith(COMPOSED):
        return users
    return f"{COMPOSED}with_{users.encode().hex()}"
