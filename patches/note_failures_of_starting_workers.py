"""A worker process that fails while it starts writes down what happened before it ends.

Why: its executor sees a closed pipe and no more ("See stack trace for root cause"). What it does not change: the
exception, which goes on.
"""

from __future__ import annotations

import inspect
from typing import Any

import wrapt

from vllm_overlay.failures import describe, note
from vllm_overlay.patch import Patch


def build(original: Any) -> Any:
    signature = inspect.signature(original)

    def note_and_raise(wrapped: Any, process: Any, args: Any, kwargs: Any) -> None:
        try:
            wrapped(*args, **kwargs)
        except Exception as error:
            rank = signature.bind(process, *args, **kwargs).arguments["rank"]
            note(describe(error, "worker", rank))
            raise

    return wrapt.FunctionWrapper(original, note_and_raise)


def verify() -> None:
    from vllm.v1.executor.multiproc_executor import WorkerProc

    if "worker_main" not in vars(WorkerProc):
        raise RuntimeError("expected WorkerProc.worker_main, found none")


PATCH = Patch(
    name="note_failures_of_starting_workers",
    targets=("{MULTIPROC_EXECUTOR}:WorkerProc.__init__",),
    vllm=">=0.11",
    process="any",
    relies_on={"{MULTIPROC_EXECUTOR}:WorkerProc.__init__": ("rank",)},
    upstream="none",
    remove_when="vLLM's errors of a worker's process carry the exception that ended it",
    build=build,
    verify=verify,
)
