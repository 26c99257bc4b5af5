"""`get_request_block_hasher` takes `block_size` as well as `hash_block_size`.

Why: 0.24.0 renamed its first argument. What it does not change: what is hashed, and calls in the new form, as
vLLM's own are.
"""

from __future__ import annotations

import inspect
from typing import Any

import wrapt

from vllm_overlay.activation import count_old_call
from vllm_overlay.patch import Patch


def build(original: Any) -> Any:
    def rename(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        if args or "block_size" not in kwargs or "hash_block_size" in kwargs:
            return wrapped(*args, **kwargs)
        count_old_call(PATCH.name)
        renamed = {"hash_block_size" if name == "block_size" else name: value for name, value in kwargs.items()}
        return wrapped(**renamed)

    return wrapt.FunctionWrapper(original, rename)


def verify() -> None:
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher

    # A third argument came in 0.33 and has a default.
    inspect.signature(get_request_block_hasher).bind(hash_block_size=16, caching_hash_fn=hash)


PATCH = Patch(
    name="accept_block_size_of_hasher",
    targets=("{KV_CACHE_UTILS}:get_request_block_hasher",),
    vllm=">=0.24",
    process="engine",
    relies_on={"{KV_CACHE_UTILS}:get_request_block_hasher": ("hash_block_size", "caching_hash_fn")},
    upstream="none: vLLM promises nothing of its internals",
    remove_when="never: old programs stay as they are",
    build=build,
    verify=verify,
    old_form="get_request_block_hasher(block_size=...) of 0.11 to 0.23",
)
