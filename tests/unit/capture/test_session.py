"""What a session does around a step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_overlay.capture.session import CaptureSession


@pytest.mark.parametrize(("tokens", "poisoned"), [(3, 1), (0, 0)])
def test_the_buffer_is_poisoned_before_a_step_that_computes(tokens: int, poisoned: int) -> None:
    """CASES 9: without it, a tap that does not fire would leave the last step's rows to be stored."""
    calls: list[str] = []
    session: Any = CaptureSession.__new__(CaptureSession)
    session._taps = SimpleNamespace(poison=lambda: calls.append("poison"))
    session.prepare_step(SimpleNamespace(total_num_scheduled_tokens=tokens))
    assert len(calls) == poisoned


def test_a_signal_while_the_last_records_are_written_loses_none() -> None:
    """vLLM's handler of SIGTERM raises SystemExit in whatever line the process is."""
    written: list[str] = []
    session: Any = CaptureSession.__new__(CaptureSession)
    session._taps = None
    session._warn_of_incomplete = lambda: None
    session._recorder = SimpleNamespace(close=lambda: written.append("closed"))

    def finish(key: str, num_tokens: int, reason: str) -> None:
        if key == "b" and written == ["a"]:
            written.append("interrupted")
            raise SystemExit
        if key not in written:
            written.append(key)

    session._finish = finish
    with pytest.raises(SystemExit):
        session.close(iter([("a", 3, "stop"), ("b", 4, "stop"), ("c", 5, "length")]))
    assert written == ["a", "interrupted", "b", "c", "closed"]
