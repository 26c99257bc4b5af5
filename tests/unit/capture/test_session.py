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
