"""The front end's error of a start that failed holds what the engine that it had started wrote."""

from __future__ import annotations

import contextlib
from typing import Any, NoReturn

import pytest

from tests.patches.conftest import Apply
from vllm_overlay import failures
from vllm_overlay.patches.name_failures_of_starting_engines import PATCH, build


def describe_one(message: str) -> failures.Failure:
    with contextlib.suppress(ValueError):
        raise ValueError(message)
    return failures.describe(ValueError(message), "worker", 1)


def wait(kind: type[Exception]) -> NoReturn:
    raise kind("Engine core initialization failed. See root cause above.")


def test_the_error_keeps_its_class_and_says_what_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    module = build.__globals__
    monkeypatch.setitem(module, "read_failures_of_newest_engines", lambda: [describe_one("boom-17")])
    with pytest.raises(RuntimeError, match=r"^Engine core initialization failed\. See root cause above\.\n") as caught:
        build(wait)(RuntimeError)
    assert "what failed first: ValueError: boom-17 (rank 1, worker process " in str(caught.value)
    with pytest.raises(TimeoutError, match=r"^Engine core initialization failed\. See root cause above\.$"):
        build(wait)(TimeoutError)


def test_a_start_that_succeeds() -> None:
    addresses: Any = object()
    assert build(lambda: addresses)() is addresses


def test_it_fits(apply: Apply) -> None:
    assert len(apply(PATCH).replacements) == 1
