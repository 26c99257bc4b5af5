"""Every engine's workers carry the capture worker extension, beside the user's own if there is one.

Why: `worker_extension_cls` is vLLM's way to add methods to a worker that `collective_rpc` calls by name, and there is
one slot. What it does not change: the user's extension keeps its methods; configurations of engines in a process
without capture.
"""

from __future__ import annotations

from typing import Any

import wrapt

from vllm_overlay.capture.extension import compose_extension
from vllm_overlay.patch import Patch


def build(original: Any) -> Any:
    def install(wrapped: Any, config: Any, args: Any, kwargs: Any) -> None:
        wrapped(*args, **kwargs)
        config.worker_extension_cls = compose_extension(config.worker_extension_cls)

    return wrapt.FunctionWrapper(original, install)


def verify() -> None:
    from vllm.config.parallel import ParallelConfig

    # Building one here would import half of vLLM while vLLM is being imported; a worker without the extension refuses.
    if "worker_extension_cls" not in ParallelConfig.__dataclass_fields__:
        raise RuntimeError("expected ParallelConfig.worker_extension_cls, found no such field")


PATCH = Patch(
    name="install_capture_worker",
    targets=("{PARALLEL_CONFIG}:ParallelConfig.__post_init__",),
    vllm=">=0.11",
    process="front end",
    relies_on={},
    upstream="none: vLLM takes one extension class",
    remove_when="vLLM takes a list of extension classes from plug-ins",
    build=build,
    verify=verify,
    only_with_capture=True,
)
