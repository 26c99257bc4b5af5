"""An engine that captures is given time to write its last records before it is killed.

Why: `vllm serve` ends its engine with `shutdown_timeout`, which is 0 by default: SIGTERM and, at once, SIGKILL. What
was captured since the last commit would be lost. What it does not change: an engine that is done sooner ends sooner,
and a longer time that the user set stays.
"""

from __future__ import annotations

import inspect
from typing import Any

import wrapt

from vllm_overlay.patch import Patch

# An engine and its workers took 7 s to end on a busy two-core machine; they are waited for and not slept through.
GRACE_S = 60.0


def build(original: Any) -> Any:
    signature = inspect.signature(original)

    def wait_longer(wrapped: Any, manager: Any, args: Any, kwargs: Any) -> Any:
        bound = signature.bind(manager, *args, **kwargs)
        bound.arguments["timeout"] = max(GRACE_S, bound.arguments.get("timeout") or 0.0)
        return wrapped(*bound.args[1:], **bound.kwargs)

    return wrapt.FunctionWrapper(original, wait_longer)


def verify() -> None:
    from vllm.v1.engine.utils import CoreEngineProcManager

    default = inspect.signature(CoreEngineProcManager.shutdown).parameters["timeout"].default
    if default is not None:
        raise RuntimeError(f"expected a time in seconds or None for 'timeout', found the default {default!r}")


PATCH = Patch(
    name="give_engine_time_to_close",
    targets=("{ENGINE_PROCESSES}:CoreEngineProcManager.shutdown",),
    # Older releases have `close` instead, which always waits 5 s.
    vllm=">=0.18",
    process="front end",
    relies_on={"{ENGINE_PROCESSES}:CoreEngineProcManager.shutdown": ("timeout",)},
    upstream="none: shutdown_timeout is the user's, for requests under way",
    remove_when="vLLM waits for its workers' own clean-up whatever the timeout for requests is",
    build=build,
    verify=verify,
    only_with_capture=True,
)
