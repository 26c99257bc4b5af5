"""speculators 0.3 gets one rank's answer in a list, as from the executor it was written for.

Why: `collective_rpc(..., unique_reply_rank=r)` returned a list of one in 0.11.0 and returns the answer itself since;
the caller takes element 0, which would be the first layer in place of all of them. What it does not change: calls to
all ranks, and vLLM's executors, whose own calls expect the answer itself: only the name that speculators imported is
replaced.
"""

from __future__ import annotations

from typing import Any

import wrapt

from vllm_overlay.activation import count_old_call
from vllm_overlay.patch import Patch

EXECUTOR = "speculators.data_generation.vllm_hidden_states_generator:MultiprocExecutor"


class ListOfOne:
    """An executor whose answer of one rank comes in a list; everything else is the executor's own."""

    def __init__(self, executor: Any) -> None:
        self._executor = executor

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)

    def collective_rpc(self, *args: Any, **kwargs: Any) -> Any:
        """As vLLM's, in 0.11.0's form."""
        answer = self._executor.collective_rpc(*args, **kwargs)
        if kwargs.get("unique_reply_rank") is None:
            return answer
        count_old_call(PATCH.name)
        return [answer]


def build(original: Any) -> Any:
    def make(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> ListOfOne:
        return ListOfOne(wrapped(*args, **kwargs))

    return wrapt.FunctionWrapper(original, make)


def verify() -> None:
    import inspect

    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    if "unique_reply_rank" not in inspect.signature(MultiprocExecutor.collective_rpc).parameters:
        raise RuntimeError("expected MultiprocExecutor.collective_rpc to take unique_reply_rank")


PATCH = Patch(
    name="answer_one_rank_in_a_list",
    targets=(EXECUTOR,),
    # 0.11.0 answers in a list itself.
    vllm=">=0.11.1",
    process="any",
    relies_on={},
    upstream="none: the caller's executor is of 0.11.0",
    remove_when="nobody runs speculators 0.3 any more",
    build=build,
    verify=verify,
    old_form="executor.collective_rpc(method, unique_reply_rank=0)[0]",
    package="speculators==0.3.*",
)
