"""A `Scheduler` or `AsyncScheduler` built without `block_size` or `hash_block_size` gets those of vLLM's own engine.

Why: `block_size` is required from 0.11.1 on, and `hash_block_size` came in 0.20 with another meaning for several KV
groups; positional arguments after it moved. A scheduler without `block_size` belongs to a one-phase program, which is
noted for the shims of its other calls. On 0.11.0, which takes neither, a given size must be the one it uses. What it
does not change: calls with both, as the engine's own; a `block_size` that is given.
"""

from __future__ import annotations

import inspect
import itertools
from typing import Any

import wrapt

from vllm_overlay.activation import count_old_call, current_ledger
from vllm_overlay.compat.releases import seam_for
from vllm_overlay.old_programs import note_scheduler
from vllm_overlay.patch import Patch

BEFORE = ("vllm_config", "kv_cache_config", "structured_output_manager")
SIZES = ("block_size", "hash_block_size")
AFTER = ("mm_registry", "include_finished_set", "log_stats")


def build(original: Any) -> Any:
    taken = {name for name in SIZES if name in inspect.signature(original).parameters}

    def give(wrapped: Any, scheduler: Any, args: Any, kwargs: Any) -> None:
        positional = name_positional(args)
        named = positional | kwargs
        given = {name for name in SIZES if name in named}
        if given == taken or positional.keys() & kwargs.keys() or not named.keys() >= set(BEFORE):
            wrapped(*args, **kwargs)
            return
        sizes = seam_for(current_ledger().release).settle_block_sizes(named["kv_cache_config"], named["vllm_config"])
        for name in given - taken:
            check_size(name, named.pop(name), sizes["block_size"])
        if named.get("block_size", sizes["block_size"]) == sizes["block_size"]:
            named |= {name: sizes[name] for name in taken - given}
        wrapped(**named)
        if "block_size" in taken - given:
            note_scheduler(scheduler)
        count_old_call(PATCH.name)

    return wrapt.FunctionWrapper(original, give)


def name_positional(args: tuple[Any, ...]) -> dict[str, Any]:
    """Positional arguments by name: sizes are numbers, and the registry that once stood in their place is none."""
    may_be_sizes = args[len(BEFORE) : len(BEFORE) + len(SIZES)]
    count = len(list(itertools.takewhile(lambda value: value is None or type(value) is int, may_be_sizes)))
    names = (*BEFORE, *SIZES[:count], *AFTER)
    if len(args) > len(names):
        raise TypeError(f"Scheduler takes {len(names)} positional arguments, but {len(args)} were given")
    return dict(zip(names, args, strict=False))


def check_size(name: str, given: int | None, used: int) -> None:
    if given not in (None, used):
        raise TypeError(f"Scheduler: this release has no {name} and uses {used}, but {given} was asked for")


def verify() -> None:
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler

    if Scheduler not in AsyncScheduler.__mro__:
        raise RuntimeError("expected AsyncScheduler to be a Scheduler: its __init__ would not come by here")


PATCH = Patch(
    name="give_scheduler_block_sizes",
    targets=("{SCHEDULER}:Scheduler.__init__",),
    vllm=">=0.11",
    process="engine",
    relies_on={"{SCHEDULER}:Scheduler.__init__": (*BEFORE, *AFTER)},
    upstream="none: vLLM promises nothing of its internals",
    remove_when="never: old programs stay as they are",
    build=build,
    verify=verify,
    old_form="Scheduler(vllm_config, kv_cache_config, manager, ...) without block_size or hash_block_size",
)
