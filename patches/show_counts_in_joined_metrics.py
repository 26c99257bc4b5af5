"""`/metrics` shows what the workers have captured, whichever of several API servers answers.

Why: with PROMETHEUS_MULTIPROC_DIR, which vLLM sets for several API servers, every scrape joins what the servers wrote
there, in a registry made for that scrape by the package that adds the route. What it does not change: what they wrote,
and how it is joined.
"""

from __future__ import annotations

from typing import Any

import wrapt

from vllm_overlay.capture.counts import CountsCollector
from vllm_overlay.patch import Patch


def build(original: Any) -> Any:
    def show(wrapped: Any, collector: Any, args: Any, kwargs: Any) -> Any:
        return [*wrapped(*args, **kwargs), *CountsCollector().collect()]

    return wrapt.FunctionWrapper(original, show)


def verify() -> None:
    from prometheus_client.multiprocess import MultiProcessCollector

    if "registry" not in MultiProcessCollector.__init__.__code__.co_varnames:
        raise RuntimeError("expected MultiProcessCollector to register itself in a registry")


PATCH = Patch(
    name="show_counts_in_joined_metrics",
    targets=("prometheus_client.multiprocess:MultiProcessCollector.collect",),
    vllm=">=0.11",
    process="any",
    relies_on={},
    upstream="none: the counts are ours",
    remove_when="never",
    build=build,
    verify=verify,
    only_with_capture=True,
    package="prometheus_client>=0.18",
)
