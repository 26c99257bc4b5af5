"""vLLM knows the `VLLM_OVERLAY*` variables.

Why: newer releases warn of every `VLLM_` variable that is not in `vllm.envs.environment_variables`, or refuse to
start (`fail_on_environ_validation`). What it does not change: the variables do not show when the table is iterated,
because `vllm.envs.compile_factors` hashes what it iterates, and a store's path must not enter a compile-cache key.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from vllm_overlay.patch import Patch
from vllm_overlay.settings import VARIABLES


class KnownVariables(dict[str, Callable[[], Any]]):
    """vLLM's table of variables, in which ours can be looked up but not seen in passing."""

    def __contains__(self, name: object) -> bool:
        return name in VARIABLES or super().__contains__(name)

    def __missing__(self, name: str) -> Callable[[], Any]:
        if name in VARIABLES:
            return lambda: os.environ.get(name)
        raise KeyError(name)


def build(original: dict[str, Callable[[], Any]]) -> KnownVariables:
    return KnownVariables(original)


def verify() -> None:
    from vllm import envs

    shown = [name for name in envs.environment_variables if name in VARIABLES]
    if "VLLM_OVERLAY" not in envs.environment_variables or shown:
        raise RuntimeError(f"expected our variables known and not iterated, found iterated: {shown}")


PATCH = Patch(
    name="know_overlay_variables",
    targets=("{ENVS}:environment_variables",),
    vllm=">=0.11",
    process="front end",
    relies_on={},
    upstream="none: the variables are ours",
    remove_when="never",
    build=build,
    verify=verify,
)
