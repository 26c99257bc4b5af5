"""`get_kv_cache_config_from_groups` takes its call with and without `kv_cache_specs`, in every release.

Why: 0.11 wanted the layers' specs as the third of four arguments, and from 0.12.0 on they are read from the groups,
which were made of them, also where there are several. From 0.29.0 on the layout of KV caches must be settled first,
which only the engine does: for a program with an executor of its own it is settled here. What it does not change:
calls in the release's own form with a layout that is settled, as all of vLLM's are.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import wrapt

from vllm_overlay.activation import count_old_call, current_ledger
from vllm_overlay.compat.releases import seam_for
from vllm_overlay.old_programs import find_executor
from vllm_overlay.patch import Patch


def build(original: Any) -> Any:
    takes_specs = "kv_cache_specs" in inspect.signature(original).parameters

    def plan(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        named = name_positional(args) | kwargs
        is_other_form = ("kv_cache_specs" in named) != takes_specs
        groups = named["kv_cache_groups"]
        settled_now = settle_layout(named["vllm_config"], groups)
        if is_other_form or settled_now:
            count_old_call(PATCH.name)
        if not is_other_form:
            return wrapped(*args, **kwargs)
        if takes_specs:
            named["kv_cache_specs"] = {name: group.kv_cache_spec for group in groups for name in group.layer_names}
        else:
            del named["kv_cache_specs"]
        return wrapped(**named)

    return wrapt.FunctionWrapper(original, plan)


def name_positional(args: tuple[Any, ...]) -> dict[str, Any]:
    """Positional arguments by name: specs are a mapping, and what stands in their place in the newer form is bytes."""
    names = ["vllm_config", "kv_cache_groups", "kv_cache_specs", "available_memory"]
    if len(args) > 2 and not isinstance(args[2], Mapping):
        names.remove("kv_cache_specs")
    if len(args) > len(names):
        raise TypeError(f"get_kv_cache_config_from_groups takes ({', '.join(names)}), but got {len(args)} arguments")
    return dict(zip(names, args, strict=False))


def settle_layout(vllm_config: Any, groups: Iterable[Any]) -> bool:
    specs = [group.kv_cache_spec for group in groups]
    # A group of several kinds of layers holds their specs by layer.
    layers = [one for spec in specs for one in getattr(spec, "kv_cache_specs", {"": spec}).values()]
    seam = seam_for(current_ledger().release)
    return seam.settle_kv_cache_layout(vllm_config, find_executor(vllm_config), layers)


def verify() -> None:
    from vllm.v1.kv_cache_interface import KVCacheGroupSpec

    missing = [name for name in ("layer_names", "kv_cache_spec") if name not in KVCacheGroupSpec.__dataclass_fields__]
    if missing:
        raise RuntimeError(f"expected KVCacheGroupSpec with {', '.join(missing)}")


PATCH = Patch(
    name="accept_kv_cache_specs",
    targets=("{KV_CACHE_PLANNING}:get_kv_cache_config_from_groups",),
    vllm=">=0.11",
    process="engine",
    relies_on={
        "{KV_CACHE_PLANNING}:get_kv_cache_config_from_groups": ("vllm_config", "kv_cache_groups", "available_memory")
    },
    upstream="none: vLLM promises nothing of its internals",
    remove_when="never: old programs stay as they are",
    build=build,
    verify=verify,
    old_form="get_kv_cache_config_from_groups(vllm_config, groups, specs, memory) of 0.11; on 0.11, without specs",
)
