"""`get_uniform_page_size` takes the specs by layer, as 0.11 did, as well as the specs alone.

Why: from 0.12.0 on it takes the specs, under another name, and a mapping would give it the layers' names. What it
does not change: calls with specs alone, as vLLM's own are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import wrapt

from vllm_overlay.activation import count_old_call
from vllm_overlay.patch import Patch


def build(original: Any) -> Any:
    def unpack(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        specs = args[0] if args else kwargs.get("kv_cache_spec", kwargs.get("kv_cache_specs"))
        if len(args) + len(kwargs) != 1 or not isinstance(specs, Mapping):
            return wrapped(*args, **kwargs)
        count_old_call(PATCH.name)
        return wrapped(list(specs.values()))

    return wrapt.FunctionWrapper(original, unpack)


def verify() -> None:
    from vllm.v1.kv_cache_interface import KVCacheSpec

    if "page_size_bytes" not in vars(KVCacheSpec):
        raise RuntimeError("expected KVCacheSpec.page_size_bytes, found none")


PATCH = Patch(
    name="accept_specs_by_layer",
    targets=("{KV_CACHE_PLANNING}:get_uniform_page_size",),
    vllm=">=0.12",
    process="engine",
    relies_on={"{KV_CACHE_PLANNING}:get_uniform_page_size": ("kv_cache_specs",)},
    upstream="none: vLLM promises nothing of its internals",
    remove_when="never: old programs stay as they are",
    build=build,
    verify=verify,
    old_form="get_uniform_page_size(kv_cache_spec) of 0.11, a mapping by layer",
)
