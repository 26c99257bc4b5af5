"""An old program's workers are warmed up with their KV caches; everybody else's when they are told to."""

from __future__ import annotations

from typing import Any

import pytest

from tests.patches.conftest import ApplyShim
from vllm_overlay.old_programs import note_config
from vllm_overlay.patches.warm_up_after_initialize import PATCH


class Config:
    def __init__(self) -> None:
        self.scheduler_config = Config.__new__(Config)


@pytest.mark.parametrize("old", [False, True])
def test_who_is_warmed_up(apply_shim: ApplyShim, old: bool) -> None:
    old_calls = apply_shim(PATCH)
    from vllm.v1.executor.abstract import Executor

    class Fake(Executor):  # type: ignore[misc]
        def __init__(self) -> None:
            self.vllm_config = Config()
            self.calls: list[str] = []

        def collective_rpc(self, method: str, **kwargs: Any) -> list[Any]:
            self.calls.append(method)
            return []

        def _init_executor(self) -> None: ...

        def check_health(self) -> None: ...

    executor = Fake()
    if old:
        note_config(executor.vllm_config.scheduler_config)
    executor.initialize_from_config([])
    done = ["initialize_from_config", "compile_or_warm_up_model"]
    assert executor.calls == done[: 2 if old else 1]
    assert old_calls() == int(old)
    # A program that asks for it itself has it once, and again when it asks again.
    executor.compile_or_warm_up_model()
    assert executor.calls == done
    executor.compile_or_warm_up_model()
    assert executor.calls == [*done, "compile_or_warm_up_model"]
