"""Finished requests are requests to newer programs and pairs to those of 0.17 to 0.25."""

from __future__ import annotations

from pathlib import Path

from tests.patches import parts
from tests.patches.conftest import ApplyShim
from vllm_overlay.patches.give_scheduler_block_sizes import PATCH as SIZES
from vllm_overlay.patches.unpack_finished_requests import PATCH


def test_both_forms(apply_shim: ApplyShim, tmp_path: Path) -> None:
    old_calls = apply_shim(PATCH)
    apply_shim(SIZES)
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import RequestStatus

    scheduler = Scheduler(**parts.make_scheduler_arguments(tmp_path))
    for request_id in ("a", "b"):
        scheduler.add_request(parts.make_request(request_id, client_index=7))
    finished = scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
    assert {request.request_id for request in finished} == {"a", "b"}
    assert old_calls() == 0
    assert {(request_id, client) for request_id, client in finished} == {("a", 7), ("b", 7)}
    assert old_calls() == 2
    assert finished[0][1] == 7
