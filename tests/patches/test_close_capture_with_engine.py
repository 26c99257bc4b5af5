"""Workers close before the engine does, and a failure to write does not keep the engine from closing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.patches.conftest import Apply
from vllm_overlay.patches.close_capture_with_engine import PATCH


def make_engine(calls: list[str], rpc: Any) -> Any:
    from vllm.v1.engine.core import EngineCore

    engine = EngineCore.__new__(EngineCore)
    engine.structured_output_manager = SimpleNamespace(clear_backend=lambda: calls.append("backend"))
    engine.model_executor = SimpleNamespace(collective_rpc=rpc, shutdown=lambda: calls.append("executor"))

    class Scheduler:
        def shutdown(self) -> None:
            calls.append("scheduler")

    engine.scheduler = Scheduler()
    return engine


def test_workers_close_first(apply: Apply) -> None:
    calls: list[str] = []
    apply(PATCH)
    make_engine(calls, lambda method, **kwargs: calls.append(method)).shutdown()
    assert calls[0] == "overlay_close"
    assert {"executor", "scheduler"} <= set(calls)


def test_a_failure_reaches_the_caller_after_the_engine_has_closed(apply: Apply) -> None:
    calls: list[str] = []

    def fail(method: str, **kwargs: Any) -> None:
        raise OSError("disk full")

    apply(PATCH)
    with pytest.raises(OSError, match="disk full"):
        make_engine(calls, fail).shutdown()
    assert {"executor", "scheduler"} <= set(calls)
