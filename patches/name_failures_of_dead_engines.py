"""`EngineDeadError` says what ended the engine.

Why: its text is one sentence for everything ("See stack trace (above) for the root cause"), and it is what the caller
of `generate` and the client of the API server get. What it does not change: the class, and how its text begins.
"""

from __future__ import annotations

from typing import Any

import wrapt

from vllm_overlay.failures import add_failures, read_failures_of_last_engine
from vllm_overlay.patch import Patch


def build(original: Any) -> Any:
    def make_and_tell(wrapped: Any, error: Any, args: Any, kwargs: Any) -> None:
        wrapped(*args, **kwargs)
        add_failures(error, read_failures_of_last_engine())

    return wrapt.FunctionWrapper(original, make_and_tell)


def verify() -> None:
    from vllm.v1.engine.exceptions import EngineDeadError

    if not isinstance(EngineDeadError().args[0], str):
        raise RuntimeError(f"expected EngineDeadError with a text, found {EngineDeadError().args!r}")


PATCH = Patch(
    name="name_failures_of_dead_engines",
    targets=("{ENGINE_EXCEPTIONS}:EngineDeadError.__init__",),
    vllm=">=0.11",
    process="front end",
    relies_on={},
    upstream="none",
    remove_when="vLLM's EngineDeadError carries the exception that ended the engine",
    build=build,
    verify=verify,
)
