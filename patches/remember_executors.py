"""The executor of a configuration can be found again, as long as somebody holds it.

Why: from 0.29.0 on the KV caches' layout is settled between the engine, its configuration and its executor; an old
program plans KV caches with a configuration alone, and `accept_kv_cache_specs` needs the executor that goes with it.
What it does not change: executors, and how long they live.
"""

from __future__ import annotations

from typing import Any

import wrapt

from vllm_overlay.old_programs import note_executor
from vllm_overlay.patch import Patch


def build(original: Any) -> Any:
    def make_and_note(wrapped: Any, executor: Any, args: Any, kwargs: Any) -> None:
        wrapped(*args, **kwargs)
        note_executor(executor)

    return wrapt.FunctionWrapper(original, make_and_note)


def verify() -> None:
    from vllm.v1.executor.abstract import Executor

    missing = [name for name in ("get_supported_kv_cache_layouts", "set_kv_cache_layout") if name not in vars(Executor)]
    if missing:
        raise RuntimeError(f"expected Executor with {', '.join(missing)}")


PATCH = Patch(
    name="remember_executors",
    targets=("{EXECUTOR}:Executor.__init__",),
    vllm=">=0.29",
    process="engine",
    relies_on={"{EXECUTOR}:Executor.__init__": ("vllm_config",)},
    upstream="none: vLLM promises nothing of its internals",
    remove_when="never: old programs stay as they are",
    build=build,
    verify=verify,
)
