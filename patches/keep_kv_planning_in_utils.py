"""The functions that plan KV caches answer in `kv_cache_utils` too, with their signatures of 0.11.

Why: 0.33.0 moved them to `kv_cache_planning`, and `get_kv_cache_configs` there requires the groups of all workers,
which it made itself before. What it does not change: the functions, where vLLM calls them.
"""

from __future__ import annotations

import importlib
import importlib.util
from functools import partial
from typing import Any

from vllm_overlay.activation import count_old_call
from vllm_overlay.patch import Patch, Restoration

NEW_HOME = "vllm.v1.core.kv_cache_planning"
MOVED = (
    "_get_kv_cache_groups_uniform_page_size",
    "_get_kv_cache_groups_uniform_spec",
    "_get_kv_cache_groups_uniform_type",
    "check_enough_kv_cache_memory",
    "create_kv_cache_group_specs",
    "estimate_max_model_len",
    "get_kv_cache_config_from_groups",
    "get_kv_cache_groups",
    "get_uniform_page_size",
    "is_kv_cache_spec_uniform",
    "is_kv_cache_type_attention_free",
    "max_memory_usage_bytes",
    "may_override_num_blocks",
    "unify_hybrid_kv_cache_specs",
)


def build(original: str) -> Any:
    """The function `original` of the old place. The new module imports the old one, so it is looked up late."""

    def call_in_new_home(*args: Any, **kwargs: Any) -> Any:
        count_old_call(PATCH.name)
        return getattr(importlib.import_module(NEW_HOME), original)(*args, **kwargs)

    return call_in_new_home


def build_get_kv_cache_configs() -> Any:
    def get_kv_cache_configs(vllm_config: Any, kv_cache_specs: Any, available_memory: Any) -> Any:
        from vllm.v1.core import kv_cache_planning

        count_old_call(PATCH.name)
        groups = kv_cache_planning.get_global_kv_cache_groups(vllm_config, kv_cache_specs)
        return kv_cache_planning.get_kv_cache_configs(vllm_config, kv_cache_specs, available_memory, groups)

    return get_kv_cache_configs


def verify() -> None:
    if importlib.util.find_spec(NEW_HOME) is None:
        raise RuntimeError(f"expected {NEW_HOME}, found no such module")


PATCH = Patch(
    name="keep_kv_planning_in_utils",
    targets=(),
    vllm=">=0.33",
    process="engine",
    relies_on={},
    upstream="none: vLLM promises nothing of its internals",
    remove_when="never: old programs stay as they are",
    build=build,
    verify=verify,
    restores=(
        *(Restoration(f"{{KV_CACHE_UTILS}}:{name}", partial(build, name)) for name in MOVED),
        Restoration("{KV_CACHE_UTILS}:get_kv_cache_configs", build_get_kv_cache_configs),
    ),
    old_form="from vllm.v1.core.kv_cache_utils import get_kv_cache_configs, ... of 0.11 to 0.32",
)
