"""An engine in its caller's own process closes its workers' stores before that process exits.

Why: with VLLM_ENABLE_V1_MULTIPROCESSING=0 nobody calls `EngineCore.shutdown`; the executor kills its workers from a
finalizer and what the last steps captured would be lost. What it does not change: an engine in a process of its own,
which `close_capture_with_engine` serves; the order of vLLM's own finalizers.
"""

from __future__ import annotations

from typing import Any

import wrapt

from vllm_overlay.capture.finished import close_at_exit
from vllm_overlay.patch import Patch


def build(original: Any) -> Any:
    def make_and_register(wrapped: Any, engine: Any, args: Any, kwargs: Any) -> None:
        wrapped(*args, **kwargs)
        close_at_exit(engine)

    return wrapt.FunctionWrapper(original, make_and_register)


def verify() -> None:
    from vllm.v1.engine.core import EngineCore

    if "shutdown" not in vars(EngineCore):
        raise RuntimeError("expected EngineCore.shutdown, found none: how does this engine end?")


PATCH = Patch(
    name="close_capture_at_exit",
    targets=("{ENGINE_CORE}:EngineCore.__init__",),
    vllm=">=0.11",
    process="engine",
    relies_on={},
    upstream="none",
    remove_when="vLLM shuts an in-process engine down in order at exit",
    build=build,
    verify=verify,
    only_with_capture=True,
)
