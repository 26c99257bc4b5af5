"""A worker answers a failed call with the exception's type, text, rank, file, line and traceback.

Why: it answers with `str(error)`, which is empty for a bare `assert` ("Worker failed with error ''"); and through
0.24 an output that cannot be had ends the thread that hands outputs over, so that the caller waits for good. What it
does not change: answers of calls that succeed.
"""

from __future__ import annotations

from typing import Any

import wrapt

from vllm_overlay.failures import describe
from vllm_overlay.patch import Patch


def build(original: Any) -> Any:
    def tell(wrapped: Any, process: Any, args: Any, kwargs: Any) -> None:
        output = _finish(kwargs["output"] if "output" in kwargs else args[0])
        if isinstance(output, Exception):
            output = RuntimeError(describe(output, "worker", process.rank).text)
        wrapped(output)

    return wrapt.FunctionWrapper(original, tell)


def _finish(output: Any) -> Any:
    """The output itself where it has not left the device yet, or what went wrong on the way."""
    from vllm.v1.outputs import AsyncModelRunnerOutput

    if not isinstance(output, AsyncModelRunnerOutput):
        return output
    try:
        return output.get_output()
    except Exception as error:  # noqa: BLE001  the answer of this call, as every exception of a worker is
        return error


def verify() -> None:
    from vllm.v1.executor.multiproc_executor import WorkerProc

    if "FAILURE" not in WorkerProc.ResponseStatus.__members__:
        raise RuntimeError("expected WorkerProc.ResponseStatus.FAILURE, found none")


PATCH = Patch(
    name="tell_whole_worker_errors",
    targets=("{MULTIPROC_EXECUTOR}:WorkerProc.enqueue_output",),
    vllm=">=0.11",
    process="any",
    relies_on={"{MULTIPROC_EXECUTOR}:WorkerProc.enqueue_output": ("output",)},
    upstream="none",
    remove_when="vLLM's workers answer with more than str(error)",
    build=build,
    verify=verify,
)
