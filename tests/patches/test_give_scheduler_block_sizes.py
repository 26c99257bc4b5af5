"""Schedulers built without sizes have those of the engine, by keyword and by position."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest

from tests.patches import parts
from tests.patches.conftest import ApplyShim
from vllm_overlay.old_programs import find_scheduler
from vllm_overlay.patches.give_scheduler_block_sizes import PATCH, SIZES, name_positional


@pytest.fixture
def arguments(tmp_path: Path) -> dict[str, Any]:
    return parts.make_scheduler_arguments(tmp_path)


@pytest.fixture(params=["Scheduler", "AsyncScheduler"])
def scheduler_class(request: pytest.FixtureRequest) -> Any:
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler

    return {"Scheduler": Scheduler, "AsyncScheduler": AsyncScheduler}[request.param]


def taken_sizes() -> list[str]:
    from vllm.v1.core.sched.scheduler import Scheduler

    return [name for name in SIZES if name in inspect.signature(Scheduler.__init__).parameters]


def test_without_sizes_as_the_engine(apply_shim: ApplyShim, arguments: dict[str, Any], scheduler_class: Any) -> None:
    names = taken_sizes()
    old_calls = apply_shim(PATCH)
    scheduler = scheduler_class(**arguments)
    assert scheduler.block_size == parts.BLOCK_SIZE
    assert old_calls() == (1 if names else 0)
    assert find_scheduler(arguments["vllm_config"]) is (scheduler if names else None)
    scheduler.add_request(parts.make_request())
    output = scheduler.schedule()
    assert output.num_scheduled_tokens == {"a": 3}
    finish(scheduler)


def finish(scheduler: Any) -> None:
    """`finish_requests` as an old program calls it: what it returns is not looked at."""
    from vllm.v1.request import RequestStatus

    scheduler.finish_requests(["a"], RequestStatus.FINISHED_ABORTED)
    assert "a" not in scheduler.requests
    assert scheduler.schedule().total_num_scheduled_tokens == 0


def test_with_every_size_straight_through(
    apply_shim: ApplyShim, arguments: dict[str, Any], scheduler_class: Any
) -> None:
    names = taken_sizes()
    old_calls = apply_shim(PATCH)
    scheduler = scheduler_class(**arguments, **dict.fromkeys(names, parts.BLOCK_SIZE))
    assert scheduler.block_size == parts.BLOCK_SIZE
    assert old_calls() == 0
    assert find_scheduler(arguments["vllm_config"]) is None


def test_a_block_size_that_is_given_stays(apply_shim: ApplyShim, arguments: dict[str, Any]) -> None:
    from vllm.v1.core.sched.scheduler import Scheduler

    if "hash_block_size" not in taken_sizes():
        pytest.skip("this release has one size")
    apply_shim(PATCH)
    assert Scheduler(**arguments, block_size=parts.BLOCK_SIZE).block_size == parts.BLOCK_SIZE
    assert Scheduler(**arguments, block_size=2 * parts.BLOCK_SIZE).block_size == 2 * parts.BLOCK_SIZE
    assert find_scheduler(arguments["vllm_config"]) is None


def test_several_groups_as_the_engine(apply_shim: ApplyShim, arguments: dict[str, Any]) -> None:
    from vllm.v1.core.sched.scheduler import Scheduler

    if "hash_block_size" not in taken_sizes():
        pytest.skip("before, the block size is the configuration's whatever the groups are")
    from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes

    arguments["vllm_config"].cache_config.enable_prefix_caching = True
    arguments["kv_cache_config"].kv_cache_groups = parts.make_groups(16, 32)
    apply_shim(PATCH)
    scheduler = Scheduler(**arguments)
    block_size, hash_block_size = resolve_kv_cache_block_sizes(arguments["kv_cache_config"], arguments["vllm_config"])
    assert scheduler.block_size == block_size == 32
    assert scheduler.kv_cache_manager.block_pool.hash_block_size == hash_block_size == 16


def test_a_release_without_the_size_takes_its_own_and_no_other(
    apply_shim: ApplyShim, arguments: dict[str, Any]
) -> None:
    from vllm.v1.core.sched.scheduler import Scheduler

    if taken_sizes():
        pytest.skip("this release takes sizes")
    old_calls = apply_shim(PATCH)
    assert Scheduler(**arguments, block_size=parts.BLOCK_SIZE).block_size == parts.BLOCK_SIZE
    assert old_calls() == 1
    with pytest.raises(TypeError, match="uses 16, but 32 was asked for"):
        Scheduler(**arguments, block_size=32)


def test_positional_arguments_by_what_they_are() -> None:
    registry = object()
    first = {"vllm_config": 1, "kv_cache_config": 2, "structured_output_manager": 3}
    after = {"mm_registry": registry, "include_finished_set": True}
    assert name_positional((1, 2, 3)) == first
    assert name_positional((1, 2, 3, registry, True)) == first | after
    assert name_positional((1, 2, 3, 16, registry, True)) == first | after | {"block_size": 16}
    assert name_positional((1, 2, 3, 16, None)) == first | {"block_size": 16, "hash_block_size": None}
    with pytest.raises(TypeError, match="takes 6 positional arguments"):
        name_positional((1, 2, 3, registry, True, True, 5))


def test_a_missing_argument_is_named_by_the_release(apply_shim: ApplyShim) -> None:
    from vllm.v1.core.sched.scheduler import Scheduler

    old_calls = apply_shim(PATCH)
    with pytest.raises(TypeError, match="kv_cache_config"):
        Scheduler(vllm_config=None)
    assert old_calls() == 0
