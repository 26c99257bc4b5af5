"""The error of an executor whose workers did not start says what failed in them.

Why: it says "See stack trace for root cause" and carries nothing of it. What it does not change: its class and the
beginning of its text; executors of other kinds, Ray's among them.
"""

from __future__ import annotations

import inspect
from typing import Any

import wrapt

from vllm_overlay.failures import add_failures, read_failures
from vllm_overlay.patch import Patch


def build(original: Any) -> Any:
    signature = inspect.signature(original)

    def wait_and_tell(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        try:
            return wrapped(*args, **kwargs)
        except Exception as error:
            handles = signature.bind(*args, **kwargs).arguments["unready_proc_handles"]
            add_failures(error, read_failures({handle.proc.pid for handle in handles}))
            raise

    return wrapt.FunctionWrapper(original, wait_and_tell)


def verify() -> None:
    from vllm.v1.executor.multiproc_executor import UnreadyWorkerProcHandle

    if "proc" not in UnreadyWorkerProcHandle.__annotations__:
        raise RuntimeError("expected UnreadyWorkerProcHandle.proc, found no such field")


PATCH = Patch(
    name="name_failures_of_starting_workers",
    targets=("{MULTIPROC_EXECUTOR}:WorkerProc.wait_for_ready",),
    vllm=">=0.11",
    process="any",
    relies_on={"{MULTIPROC_EXECUTOR}:WorkerProc.wait_for_ready": ("unready_proc_handles",)},
    upstream="none",
    remove_when="vLLM's errors of a worker's process carry the exception that ended it",
    build=build,
    verify=verify,
)
