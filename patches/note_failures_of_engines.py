"""An engine's process that an exception ends writes down what happened before anybody is told that it is dead.

Why: the caller gets a fixed sentence ("See stack trace (above) for the root cause"). What is written first is what
happened first: the engine's clean-up comes after it. What it does not change: the exception, which goes on.
"""

from __future__ import annotations

from typing import Any

import wrapt

from vllm_overlay.failures import describe, note, rank_of_this_process
from vllm_overlay.patch import Patch


def build(original: Any) -> Any:
    def note_and_raise(wrapped: Any, engine: Any, args: Any, kwargs: Any) -> Any:
        try:
            return wrapped(*args, **kwargs)
        except Exception as error:
            note(describe(error, "engine", rank_of_this_process()))
            raise

    return wrapt.FunctionWrapper(original, note_and_raise)


def verify() -> None:
    from vllm.v1.engine.core import EngineCoreProc

    if "_send_engine_dead" not in vars(EngineCoreProc):
        raise RuntimeError("expected EngineCoreProc._send_engine_dead, found none")


PATCH = Patch(
    name="note_failures_of_engines",
    targets=(
        "{ENGINE_CORE}:EngineCoreProc.__init__",
        "{ENGINE_CORE}:EngineCoreProc.run_busy_loop",
        "{ENGINE_CORE}:DPEngineCoreProc.run_busy_loop",
    ),
    vllm=">=0.11",
    process="engine",
    relies_on={},
    upstream="none",
    remove_when="vLLM's errors of an engine's process carry the exception that ended it",
    build=build,
    verify=verify,
)
