"""At exit an engine's workers are closed once, and not again when the engine was shut down before."""

from __future__ import annotations

import atexit
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from tests.patches.conftest import Apply
from vllm_overlay.capture.finished import close_workers
from vllm_overlay.patches.close_capture_at_exit import PATCH, build


class Scheduler:
    pass


class Engine:
    @build
    def __init__(self, calls: list[str]) -> None:
        self.scheduler = Scheduler()
        self.model_executor = SimpleNamespace(collective_rpc=lambda method, **kwargs: calls.append(method))


@pytest.fixture
def at_exit(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], None]]:
    registered: list[Callable[[], None]] = []
    monkeypatch.setattr(atexit, "register", lambda function, *args: registered.append(lambda: function(*args)))
    return registered


def test_workers_close_at_exit(at_exit: list[Callable[[], None]]) -> None:
    calls: list[str] = []
    engine: Any = Engine(calls)
    assert calls == []
    at_exit[0]()
    assert calls == ["overlay_close"]
    at_exit[0]()
    assert calls == ["overlay_close"]
    assert engine is not None


def test_an_engine_that_was_shut_down_or_is_gone_is_left_alone(at_exit: list[Callable[[], None]]) -> None:
    calls: list[str] = []
    engine: Any = Engine(calls)
    close_workers(engine.model_executor, engine.scheduler)
    at_exit[0]()
    assert calls == ["overlay_close"]
    del engine
    Engine(calls)
    at_exit[1]()
    assert calls == ["overlay_close"]


def test_it_fits_this_vllm(apply: Apply) -> None:
    assert apply(PATCH).replacements[0].is_in_place()
