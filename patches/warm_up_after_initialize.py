"""`Executor.initialize_from_config` warms the workers up for an old program, as it did through 0.26.

Why: from 0.27 on the engine calls `compile_or_warm_up_model` itself, after it; an old program does not, and its first
step would compile or find no captured graph. One that asks for it as well does not get it twice. What it does not
change: vLLM's own engine, and programs that show no sign of an older release.
"""

from __future__ import annotations

import weakref
from typing import Any

import wrapt

from vllm_overlay.activation import count_old_call
from vllm_overlay.old_programs import is_old_program
from vllm_overlay.patch import Patch


def build(original: Any) -> Any:
    return wrapt.FunctionWrapper(original, _WRAPPERS[original.__name__])


def _initialize(wrapped: Any, executor: Any, args: Any, kwargs: Any) -> Any:
    result = wrapped(*args, **kwargs)
    if is_old_program(executor.vllm_config):
        count_old_call(PATCH.name)
        executor.compile_or_warm_up_model()
        _WARM.add(executor)
    return result


def _warm_up(wrapped: Any, executor: Any, args: Any, kwargs: Any) -> Any:
    if executor not in _WARM:
        return wrapped(*args, **kwargs)
    # Who asks for it now would have asked for the first time.
    _WARM.discard(executor)
    return None


_WRAPPERS = {"initialize_from_config": _initialize, "compile_or_warm_up_model": _warm_up}
# Executors that were warmed up when they were initialized.
_WARM: weakref.WeakSet[Any] = weakref.WeakSet()


def verify() -> None:
    from vllm.v1.executor.abstract import Executor

    if "collective_rpc" not in vars(Executor):
        raise RuntimeError("expected Executor.collective_rpc, by which workers are warmed up, found none")


PATCH = Patch(
    name="warm_up_after_initialize",
    targets=("{EXECUTOR}:Executor.initialize_from_config", "{EXECUTOR}:Executor.compile_or_warm_up_model"),
    vllm=">=0.27",
    process="engine",
    relies_on={},
    upstream="none: vLLM promises nothing of its internals",
    remove_when="never: old programs stay as they are",
    build=build,
    verify=verify,
    old_form="executor.initialize_from_config(configs) of 0.11 to 0.26, without compile_or_warm_up_model",
)
