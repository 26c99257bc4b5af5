"""The scheduler's freeing of a request leaves a note of its length and reason."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests.patches.conftest import Apply
from vllm_overlay.capture.finished import FinishedRequest, take_finished
from vllm_overlay.patches.note_finished_requests import PATCH


def test_the_note_is_taken_before_the_request_is_freed(apply: Apply) -> None:
    from vllm.v1.core.sched.scheduler import Scheduler

    scheduler = Scheduler.__new__(Scheduler)
    request = SimpleNamespace(
        request_id="a", num_tokens=11, is_finished=lambda: True, get_finished_reason=lambda: "length"
    )
    apply(PATCH)
    # vLLM's own method runs after the note, and fails on this empty scheduler.
    with pytest.raises(AttributeError):
        scheduler._free_request(request)
    assert take_finished(scheduler) == {"a": FinishedRequest(11, "length")}
