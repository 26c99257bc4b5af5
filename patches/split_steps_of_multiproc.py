"""0.11.0's MultiprocExecutor keeps its steps for `split_steps`.

Why: it has an `execute_model` of its own. What it does not change: what that computes and returns.
"""

from __future__ import annotations

from typing import Any

import wrapt

from vllm_overlay.old_programs import keep_step
from vllm_overlay.patch import Patch

# By its module's name: in later releases the same method is `finish_steps_of_multiproc`'s.
EXECUTE = "vllm.v1.executor.multiproc_executor:MultiprocExecutor.execute_model"


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
    targets=(EXECUTE,),
    vllm="<0.11.1",
    process="any",
    relies_on={EXECUTE: ("scheduler_output",)},
    upstream="none: 0.11.1 has two phases",
    remove_when="0.11.0 is not supported any more",
    build=build,
    verify=verify,
)
