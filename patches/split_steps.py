"""0.11.0's executors have the second phase of later releases: `sample_tokens` gives the step that was executed.

Why: from 0.11.1 on a program calls `execute_model` and then `sample_tokens`. 0.11.0 does both at once, with the
bitmask that its scheduler puts into the step; what it returned is kept until it is asked for. What it does not
change: what `execute_model` computes and returns, which is no None that would ask for the second phase.
"""

from __future__ import annotations

from typing import Any

import wrapt

from vllm_overlay.activation import count_old_call
from vllm_overlay.old_programs import keep_step, take_step
from vllm_overlay.patch import Patch, Restoration


def build(original: Any) -> Any:
    def execute(wrapped: Any, executor: Any, args: Any, kwargs: Any) -> Any:
        return keep_step(executor, args, kwargs, wrapped(*args, **kwargs))

    return wrapt.FunctionWrapper(original, execute)


def build_sample_tokens() -> Any:
    def sample_tokens(self: Any, grammar_output: Any, non_block: bool = False) -> Any:
        count_old_call(PATCH.name)
        return take_step(self, grammar_output, non_block)

    return sample_tokens


def verify() -> None:
    from vllm.v1.core.sched.output import SchedulerOutput

    if "grammar_bitmask" not in SchedulerOutput.__dataclass_fields__:
        raise RuntimeError("expected SchedulerOutput.grammar_bitmask, found no such field")


PATCH = Patch(
    name="split_steps",
    targets=("{EXECUTOR}:Executor.execute_model",),
    vllm="<0.11.1",
    process="engine",
    relies_on={"{EXECUTOR}:Executor.execute_model": ("scheduler_output",)},
    upstream="none: 0.11.1 has two phases",
    remove_when="0.11.0 is not supported any more",
    build=build,
    verify=verify,
    restores=(Restoration("{EXECUTOR}:Executor.sample_tokens", build_sample_tokens),),
    old_form="executor.execute_model(...); executor.sample_tokens(...) of 0.11.1 and later",
)
