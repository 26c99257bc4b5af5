"""What the caller of `collective_rpc` gets, of an engine beside it and of one in a process of its own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from tests.patches.conftest import Apply
from vllm_overlay import failures
from vllm_overlay.patches.tell_whole_rpc_errors import PATCH


def fail(*args: Any, **kwargs: Any) -> NoReturn:
    raise AssertionError


def make_engine(kind: Any, rpc: Any) -> Any:
    engine = kind.__new__(kind)
    engine.model_executor = SimpleNamespace(collective_rpc=rpc)
    return engine


def test_an_engine_in_a_process_of_its_own(apply: Apply, monkeypatch: pytest.MonkeyPatch) -> None:
    """CASES 22: the answer is the error's text, and nothing else gets through."""
    from vllm.v1.engine.core import EngineCoreProc

    monkeypatch.setattr(failures, "_RANKS", [0])
    apply(PATCH)
    with pytest.raises(
        RuntimeError, match=r"^AssertionError: \(no message\) \(rank 0, engine process \d+, file "
    ) as it:
        make_engine(EngineCoreProc, fail).collective_rpc("anything")
    assert "Traceback (most recent call last):" in str(it.value)
    assert make_engine(EngineCoreProc, lambda *a, **k: [17]).collective_rpc("anything") == [17]


def test_an_engine_beside_its_caller(apply: Apply) -> None:
    from vllm.v1.engine.core import EngineCore

    apply(PATCH)
    with pytest.raises(AssertionError) as caught:
        make_engine(EngineCore, fail).collective_rpc("anything")
    assert caught.value.args == ()
