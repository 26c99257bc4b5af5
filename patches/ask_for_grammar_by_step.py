"""0.11.0's scheduler gives the grammar of a step, as later releases do, as well as of requests.

Why: from 0.11.1 on a program passes `get_grammar_bitmask(scheduler_output)` on to the second phase. 0.11.0 has filled
the bitmask in `schedule` and it is in the step; here it is given in the later form, `GrammarOutput`. What it does not
change: the scheduler's own call, with requests and draft tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import wrapt

from vllm_overlay.activation import count_old_call
from vllm_overlay.patch import Patch, Restoration


@dataclass
class GrammarOutput:
    """As in 0.11.1: ids of the requests with a grammar, and a bitmask int32 `[rows, vocabulary / 32]` in that order."""

    structured_output_request_ids: list[str]
    grammar_bitmask: Any


def build(original: Any) -> Any:
    def ask(wrapped: Any, scheduler: Any, args: Any, kwargs: Any) -> Any:
        if len(args) + len(kwargs) != 1:
            return wrapped(*args, **kwargs)
        count_old_call(PATCH.name)
        step = args[0] if args else kwargs["scheduler_output"]
        if step.grammar_bitmask is None:
            return None
        return GrammarOutput(list(step.structured_output_request_ids), step.grammar_bitmask)

    return wrapt.FunctionWrapper(original, ask)


def verify() -> None:
    from vllm.v1.core.sched.output import SchedulerOutput

    used = ("grammar_bitmask", "structured_output_request_ids")
    missing = [name for name in used if name not in SchedulerOutput.__dataclass_fields__]
    if missing:
        raise RuntimeError(f"expected SchedulerOutput with {', '.join(missing)}")


PATCH = Patch(
    name="ask_for_grammar_by_step",
    targets=("{SCHEDULER}:Scheduler.get_grammar_bitmask",),
    vllm="<0.11.1",
    process="engine",
    relies_on={"{SCHEDULER}:Scheduler.get_grammar_bitmask": ("requests", "scheduled_spec_decode_tokens")},
    upstream="none: 0.11.1 has two phases",
    remove_when="0.11.0 is not supported any more",
    build=build,
    verify=verify,
    restores=(Restoration("{SCHEDULER_OUTPUT}:GrammarOutput", lambda: GrammarOutput),),
    old_form="scheduler.get_grammar_bitmask(scheduler_output) of 0.11.1 and later",
)
