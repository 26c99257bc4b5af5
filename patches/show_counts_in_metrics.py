"""vLLM's `/metrics` shows what its workers have captured.

Why: who watches a server for hours looks there, and the counts are in other processes. What it does not change: vLLM's
own metrics. Where several API servers answer for one another, `show_counts_in_joined_metrics` does the same.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakSet

import wrapt

from vllm_overlay.capture.counts import CountsCollector
from vllm_overlay.patch import Patch


def build(original: Any) -> Any:
    # A registry refuses the same names twice, and an application may be built twice.
    showing: WeakSet[Any] = WeakSet()

    def show(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        from prometheus_client import REGISTRY

        registry = wrapped(*args, **kwargs)
        # Any other one joins the files of several processes.
        if registry is REGISTRY and registry not in showing:
            showing.add(registry)
            registry.register(CountsCollector())
        return registry

    return wrapt.FunctionWrapper(original, show)


def verify() -> None:
    from prometheus_client import REGISTRY
    from vllm.v1.metrics import prometheus

    if prometheus.REGISTRY is not REGISTRY:
        raise RuntimeError("expected vllm.v1.metrics.prometheus to use prometheus_client's own registry")


PATCH = Patch(
    name="show_counts_in_metrics",
    targets=("{PROMETHEUS}:get_prometheus_registry",),
    vllm=">=0.11",
    process="front end",
    relies_on={},
    upstream="none: the counts are ours",
    remove_when="never",
    build=build,
    verify=verify,
    only_with_capture=True,
)
