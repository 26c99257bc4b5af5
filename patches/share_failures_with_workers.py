"""Worker processes know where to write what ends them, also when the engine runs in its caller's own process.

Why: a worker that fails while it starts closes its pipe, and says nothing through it. What it does not change: which
processes are started, and how.
"""

from __future__ import annotations

from typing import Any

import wrapt

from vllm_overlay.patch import Patch
from vllm_overlay.shared_folder import share_folder


def build(original: Any) -> Any:
    def share_first(wrapped: Any, executor: Any, args: Any, kwargs: Any) -> None:
        share_folder()
        wrapped(*args, **kwargs)

    return wrapt.FunctionWrapper(original, share_first)


def verify() -> None:
    from vllm.v1.executor.multiproc_executor import WorkerProc

    if "make_worker_process" not in vars(WorkerProc):
        raise RuntimeError("expected WorkerProc.make_worker_process, found none")


PATCH = Patch(
    name="share_failures_with_workers",
    targets=("{MULTIPROC_EXECUTOR}:MultiprocExecutor._init_executor",),
    vllm=">=0.11",
    process="any",
    relies_on={},
    upstream="none",
    remove_when="vLLM's errors of a worker's process carry the exception that ended it",
    build=build,
    verify=verify,
)
