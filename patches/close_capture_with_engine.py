"""An engine that shuts down first lets its workers write every finished request and close the store.

Why: the ids of the last finished requests travel with the next step, and at the end there is none: a script that
returns right after `generate` would lose its last records. What it does not change: the order and effect of vLLM's
own shutdown; a failure to write reaches the caller when that has been done.
"""

from __future__ import annotations

from typing import Any

import wrapt

from vllm_overlay.capture.finished import close_workers
from vllm_overlay.patch import Patch


def build(original: Any) -> Any:
    def close_first(wrapped: Any, engine: Any, args: Any, kwargs: Any) -> Any:
        try:
            close_workers(engine.model_executor, engine.scheduler)
        finally:
            result = wrapped(*args, **kwargs)
        return result

    return wrapt.FunctionWrapper(original, close_first)


def verify() -> None:
    from vllm.v1.executor.abstract import Executor

    if "collective_rpc" not in vars(Executor):
        raise RuntimeError("expected Executor.collective_rpc, found none")


PATCH = Patch(
    name="close_capture_with_engine",
    targets=("{ENGINE_CORE}:EngineCore.shutdown",),
    vllm=">=0.11",
    process="engine",
    relies_on={},
    upstream="none",
    remove_when="vLLM tells workers of finished requests before it shuts them down",
    build=build,
    verify=verify,
    only_with_capture=True,
)
