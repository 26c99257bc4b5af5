"""0.11.0's MultiprocExecutor keeps its steps for `split_steps`.

Why: it has an `execute_model` of its own. What it does not change: what that computes and returns.
"""

from __future__ import annotations

from typing import Any

import wrapt

from vllm_overlay.old_programs import keep_step
from vllm_overlay.patch import Patch


def build(original: Any) -> Any:
    def execute(wrapped: Any, executor: Any, args: Any, kwargs: Any) -> Any:
        return keep_step(executor, args, kwargs, wrapped(*args, **kwargs))

    return wrapt.FunctionWrapper(original, execute)


def verify() -> None:
    from vllm.v1.executor.abstract import Executor
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    if Executor not in MultiprocExecutor.__mro__:
        raise RuntimeError("expected MultiprocExecutor to be an Executor, which has sample_tokens")


PATCH = Patch(
    name="split_steps_of_multiproc",
    targets=("{MULTIPROC_EXECUTOR}:MultiprocExecutor.execute_model",),
    vllm="<0.11.1",
    process="any",
    relies_on={"{MULTIPROC_EXECUTOR}:MultiprocExecutor.execute_model": ("scheduler_output",)},
    upstream="none: 0.11.1 has two phases",
    remove_when="0.11.0 is not supported any more",
    build=build,
    verify=verify,
)
