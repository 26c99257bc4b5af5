"""The rank of a worker that lives in the engine's own process is known there.

Why: without tensor parallelism the worker is an object of the engine, and what fails in it is the engine's exception.
What it does not change: workers.
"""

from __future__ import annotations

import inspect
from typing import Any

import wrapt

from vllm_overlay.failures import note_rank
from vllm_overlay.patch import Patch


def build(original: Any) -> Any:
    signature = inspect.signature(original)

    def note_and_make(wrapped: Any, worker: Any, args: Any, kwargs: Any) -> None:
        note_rank(signature.bind(worker, *args, **kwargs).arguments["rank"])
        wrapped(*args, **kwargs)

    return wrapt.FunctionWrapper(original, note_and_make)


def verify() -> None:
    from vllm.v1.worker.worker_base import WorkerBase

    # Through 0.11 it inherits this.
    if not callable(getattr(WorkerBase, "load_model", None)):
        raise RuntimeError("expected WorkerBase to be what workers that load models are made from")


PATCH = Patch(
    name="know_rank_of_worker",
    targets=("{WORKER_BASE}:WorkerBase.__init__",),
    vllm=">=0.11",
    process="worker",
    relies_on={"{WORKER_BASE}:WorkerBase.__init__": ("rank",)},
    upstream="none",
    remove_when="vLLM's errors of an engine's process say which rank failed",
    build=build,
    verify=verify,
)
