"""`collective_rpc` of an engine in a process of its own fails with type, text, rank, file, line and traceback.

Why: the answer to its caller is `str(error)` ("Call to collective_rpc method failed: "), empty for a bare `assert`.
What it does not change: an engine in its caller's process, where the exception itself goes on.
"""

from __future__ import annotations

from typing import Any

import wrapt

from vllm_overlay.failures import describe, rank_of_this_process
from vllm_overlay.patch import Patch


def build(original: Any) -> Any:
    def call_and_tell(wrapped: Any, engine: Any, args: Any, kwargs: Any) -> Any:
        from vllm.v1.engine.core import EngineCoreProc

        try:
            return wrapped(*args, **kwargs)
        except Exception as error:
            if not isinstance(engine, EngineCoreProc):
                raise
            raise RuntimeError(describe(error, "engine", rank_of_this_process()).text) from error

    return wrapt.FunctionWrapper(original, call_and_tell)


def verify() -> None:
    from vllm.v1.engine.core import EngineCore, EngineCoreProc

    if not issubclass(EngineCoreProc, EngineCore) or "collective_rpc" in vars(EngineCoreProc):
        raise RuntimeError("expected EngineCoreProc to inherit EngineCore.collective_rpc")


PATCH = Patch(
    name="tell_whole_rpc_errors",
    targets=("{ENGINE_CORE}:EngineCore.collective_rpc",),
    vllm=">=0.11",
    process="engine",
    relies_on={},
    upstream="none",
    remove_when="vLLM's answers to utility calls carry more than str(error)",
    build=build,
    verify=verify,
)
