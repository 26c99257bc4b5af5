"""`RayDistributedExecutor.execute_model` returns a finished step to a program that has no second phase.

Why: from 0.11.1 on it returns None and `sample_tokens` finishes the step, with the grammar's bitmask that the
scheduler put into its output before. Workers are Ray's; 0.33 has this executor no more.
What it does not change: steps of schedulers built in the newer form, as the engine's is: who built one asks for the
second phase himself.
"""

from __future__ import annotations

from typing import Any

import wrapt

from vllm_overlay.old_programs import finish_step
from vllm_overlay.patch import Patch


def build(original: Any) -> Any:
    def execute(wrapped: Any, executor: Any, args: Any, kwargs: Any) -> Any:
        return finish_step(executor, wrapped(*args, **kwargs), args, kwargs, PATCH.name)

    return wrapt.FunctionWrapper(original, execute)


def verify() -> None:
    from vllm.v1.core.sched.scheduler import Scheduler

    if "get_grammar_bitmask" not in vars(Scheduler):
        raise RuntimeError("expected Scheduler.get_grammar_bitmask, found none")


PATCH = Patch(
    name="finish_steps_of_ray",
    targets=("{RAY_EXECUTOR}:RayDistributedExecutor.execute_model",),
    vllm=">=0.11.1,<0.33",
    process="any",
    relies_on={"{RAY_EXECUTOR}:RayDistributedExecutor.execute_model": ("scheduler_output", "non_block")},
    upstream="none: vLLM promises nothing of its internals",
    remove_when="never: old programs stay as they are",
    build=build,
    verify=verify,
    old_form="output = executor.execute_model(scheduler_output) of 0.11.0, without sample_tokens",
)
