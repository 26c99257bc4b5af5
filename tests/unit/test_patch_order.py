"""Shims applied in any order, or over one another, translate the same calls to the same effect."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.patches import parts
from tests.patches.conftest import applied_shim
from vllm_overlay.compat.releases import is_needed, resolve_release
from vllm_overlay.patch import Patch
from vllm_overlay.patches import PATCHES

# Ray's executor is in a module that nothing else imports.
LEFT_OUT = ("finish_steps_of_ray",)


def needed_shims() -> list[Patch]:
    release = resolve_release(importlib.import_module("vllm").__version__, policy="strict", stands_for=None)
    shims = [patch for patch in PATCHES if patch.old_form and not patch.package and patch.name not in LEFT_OUT]
    return [patch for patch in shims if is_needed(patch.vllm, release)]


@contextmanager
def applied(patches: Iterable[Patch]) -> Iterator[dict[str, Any]]:
    with ExitStack() as stack:
        yield {patch.name: stack.enter_context(applied_shim(patch)) for patch in patches}


def run_old_calls(folder: Path) -> list[Any]:
    """A program of 0.11.0 up to its first step, without an engine; plain values of what came of it."""
    from vllm import SamplingParams
    from vllm.config import SchedulerConfig
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import Request, RequestStatus

    config = SchedulerConfig(max_num_seqs=4, max_model_len=64, max_num_batched_tokens=128)
    arguments = parts.make_scheduler_arguments(folder)
    if hasattr(arguments["vllm_config"].cache_config, "kv_cache_layout"):
        arguments["vllm_config"].cache_config.kv_cache_layout = "LBNHC"
    groups = arguments["kv_cache_config"].kv_cache_groups
    specs = {"layer 0": groups[0].kv_cache_spec}
    planned = kv_cache_utils.get_kv_cache_config_from_groups(arguments["vllm_config"], groups, specs, 1 << 20)
    scheduler = Scheduler(**arguments)
    scheduler.add_request(Request("a", [1, 2, 3], SamplingParams(max_tokens=2), None, eos_token_id=9))
    step = scheduler.schedule()
    scheduler.finish_requests(["a"], RequestStatus.FINISHED_ABORTED)
    return [config.max_num_batched_tokens, planned.num_blocks, scheduler.block_size, dict(step.num_scheduled_tokens)]


@pytest.mark.parametrize("arrange", [list, lambda patches: list(reversed(patches))], ids=["forwards", "backwards"])
def test_any_order(tmp_path: Path, arrange: Any) -> None:
    """CASES 36."""
    patches = needed_shims()
    assert len(patches) >= 4
    with applied(arrange(patches)) as old_calls:
        assert run_old_calls(tmp_path) == EXPECTED
        assert {name for name, count in old_calls.items() if count() > 1} == set()


def test_over_one_another(tmp_path: Path) -> None:
    """CASES 36: as when another tool wraps the same functions. What puts a name back refuses to do it twice."""
    patches = needed_shims()
    twice = [patch for patch in patches if not patch.restores]
    with applied(patches) as inner, applied(twice) as outer:
        assert run_old_calls(tmp_path) == EXPECTED
        assert {name for name, count in (inner | outer).items() if count() > 1} == set()


# What was asked for, 1 MiB in 2 KiB blocks of 16 tokens, and the prompt in one step.
EXPECTED = [128, 512, parts.BLOCK_SIZE, {"a": 3}]
