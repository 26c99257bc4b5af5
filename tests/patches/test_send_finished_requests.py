"""A step's ids of finished requests carry what was noted of them."""

from __future__ import annotations

from types import SimpleNamespace

from vllm_overlay.capture.finished import FinishedRequest, FinishedRequests, note_finished
from vllm_overlay.patches.send_finished_requests import build

# `schedule` itself needs a whole engine: tests/live sees the facts arrive. Here, what the wrapper makes of its result.


class Scheduler:
    def schedule(self) -> SimpleNamespace:
        return SimpleNamespace(finished_req_ids={"a"})


def test_the_facts_are_attached() -> None:
    wrapped = type("Wrapped", (Scheduler,), {"schedule": build(Scheduler.__dict__["schedule"])})
    scheduler = wrapped()
    request = SimpleNamespace(request_id="a", num_tokens=3, get_finished_reason=lambda: "stop")
    note_finished(scheduler, request)
    ids = scheduler.schedule().finished_req_ids
    assert isinstance(ids, FinishedRequests)
    assert ids == {"a"}
    assert ids.facts == {"a": FinishedRequest(3, "stop")}
