"""A worker whose call fails while another rank is to answer writes down what happened and ends.

Why: vLLM logs it and waits for the next call. The rank that answers waits for this one in a collective operation, and
the caller for both: five minutes, or for good. vLLM ends an engine whose worker has died, at once. What it does not
change: the rank that answers, and calls that all ranks answer: they reply with their error.
"""

from __future__ import annotations

import functools
from typing import Any

import wrapt

from vllm_overlay.failures import describe, note
from vllm_overlay.patch import Patch


class Calls(wrapt.ObjectProxy):  # type: ignore[type-arg]
    """vLLM's queue of calls; `_self_answers` is the rank that answers the last one taken, None for all ranks."""

    _self_answers: int | None = None

    def dequeue(self, *args: Any, **kwargs: Any) -> Any:
        call = self.__wrapped__.dequeue(*args, **kwargs)
        *_, self._self_answers = call
        return call


class EndedByFailure(wrapt.ObjectProxy):  # type: ignore[type-arg]
    """vLLM's worker, whose methods end the process when they fail and another rank is to answer."""

    def __init__(self, worker: Any, calls: Calls, rank: int) -> None:
        super().__init__(worker)
        self._self_calls, self._self_rank = calls, rank

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.__wrapped__, name)
        if self._self_calls._self_answers in (None, self._self_rank) or not callable(method):
            return method

        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                return method(*args, **kwargs)
            except Exception as error:
                note(describe(error, "worker", self._self_rank))
                raise SystemExit(1) from error

        return call


def build(original: Any) -> Any:
    def watch(wrapped: Any, process: Any, args: Any, kwargs: Any) -> Any:
        calls = process.rpc_broadcast_mq = Calls(process.rpc_broadcast_mq)
        process.worker = EndedByFailure(process.worker, calls, process.rank)
        return wrapped(*args, **kwargs)

    return wrapt.FunctionWrapper(original, watch)


def verify() -> None:
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    if "start_worker_monitor" not in vars(MultiprocExecutor):
        raise RuntimeError("expected MultiprocExecutor.start_worker_monitor, which sees that a worker died, found none")


PATCH = Patch(
    name="end_silent_workers",
    targets=("{MULTIPROC_EXECUTOR}:WorkerProc.worker_busy_loop",),
    vllm=">=0.11",
    process="any",
    relies_on={},
    upstream="none",
    remove_when="vLLM's workers report a failure whichever rank answers",
    build=build,
    verify=verify,
)
