"""The error of an engine that did not start says what failed in it or in its workers.

Why: it says "Engine core initialization failed. See root cause above" and carries nothing of it. What it does not
change: its class and the beginning of its text; engines on other machines.
"""

from __future__ import annotations

from typing import Any

import wrapt

from vllm_overlay.failures import add_failures, read_failures_of_newest_engines
from vllm_overlay.patch import Patch


def build(original: Any) -> Any:
    def wait_and_tell(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        try:
            return wrapped(*args, **kwargs)
        except RuntimeError as error:
            add_failures(error, read_failures_of_newest_engines())
            raise

    return wrapt.FunctionWrapper(original, wait_and_tell)


def verify() -> None:
    from vllm.v1.engine.utils import launch_core_engines

    # `launch_core_engines` is a context manager's function, and what it wraps calls the target by its module's name.
    if "wait_for_engine_startup" not in launch_core_engines.__wrapped__.__code__.co_names:
        raise RuntimeError("expected launch_core_engines to call wait_for_engine_startup, found that it does not")


PATCH = Patch(
    name="name_failures_of_starting_engines",
    targets=("{ENGINE_PROCESSES}:wait_for_engine_startup",),
    vllm=">=0.11",
    process="front end",
    relies_on={},
    upstream="none",
    remove_when="vLLM's errors of an engine's process carry the exception that ended it",
    build=build,
    verify=verify,
)
