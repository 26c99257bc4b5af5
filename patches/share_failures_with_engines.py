"""Engine processes know where to write what ends them, and their starter knows which engines are its own.

Why: an engine's process tells the one that started it no more than that it ended. Its workers' counts of what they
captured go the same way (`show_counts_in_metrics`). What it does not change: which processes are started, and how.
"""

from __future__ import annotations

from typing import Any

import wrapt

from vllm_overlay.failures import note_engines
from vllm_overlay.patch import Patch
from vllm_overlay.shared_folder import share_folder


def build(original: Any) -> Any:
    def share_first(wrapped: Any, manager: Any, args: Any, kwargs: Any) -> None:
        share_folder()
        wrapped(*args, **kwargs)
        note_engines(manager, [process.pid for process in manager.processes])

    return wrapt.FunctionWrapper(original, share_first)


def verify() -> None:
    from vllm.v1.engine.utils import CoreEngineProcManager

    if "processes" not in CoreEngineProcManager.__init__.__code__.co_names:
        raise RuntimeError("expected CoreEngineProcManager to keep its processes in `processes`")


PATCH = Patch(
    name="share_failures_with_engines",
    targets=("{ENGINE_PROCESSES}:CoreEngineProcManager.__init__",),
    vllm=">=0.11",
    process="front end",
    relies_on={},
    upstream="none",
    remove_when="vLLM's errors of an engine's process carry the exception that ended it",
    build=build,
    verify=verify,
)
