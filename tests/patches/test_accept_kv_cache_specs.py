"""A KV-cache configuration is the same from the call with specs and from the one without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.patches import parts
from tests.patches.conftest import ApplyShim
from vllm_overlay.old_programs import note_executor
from vllm_overlay.patches.accept_kv_cache_specs import PATCH, name_positional

MEMORY = 1 << 20


@pytest.fixture
def vllm_config(tmp_path: Path) -> Any:
    config = parts.make_vllm_config(tmp_path)
    if has_layout(config):
        config.cache_config.kv_cache_layout = "LBNHC"
    return config


class Executor:
    """As much of an executor as settles a layout."""

    def __init__(self, vllm_config: Any) -> None:
        self.vllm_config = vllm_config
        self.published: list[str] = []

    def get_supported_kv_cache_layouts(self) -> list[list[str]]:
        return [["LBHNC", "LBNHC"]]

    def set_kv_cache_layout(self, name: str) -> None:
        self.published.append(name)


def has_layout(config: Any) -> bool:
    return hasattr(config.cache_config, "kv_cache_layout")


def takes_specs() -> bool:
    import inspect

    from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups

    return "kv_cache_specs" in inspect.signature(get_kv_cache_config_from_groups).parameters


@pytest.mark.parametrize("block_sizes", [(16,), (16, 16)])
def test_every_form_plans_the_same(apply_shim: ApplyShim, vllm_config: Any, block_sizes: tuple[int, ...]) -> None:
    from vllm.v1.core import kv_cache_utils

    groups = parts.make_groups(*block_sizes)
    specs = {name: group.kv_cache_spec for group in groups for name in group.layer_names}
    own = (specs, MEMORY) if takes_specs() else (MEMORY,)
    stock = kv_cache_utils.get_kv_cache_config_from_groups(vllm_config, groups, *own)
    assert stock.num_blocks > 0
    old_calls = apply_shim(PATCH)
    plan = kv_cache_utils.get_kv_cache_config_from_groups
    assert plan(vllm_config, groups, *own) == stock
    assert old_calls() == 0
    named = {"vllm_config": vllm_config, "kv_cache_groups": groups, "available_memory": MEMORY}
    if takes_specs():
        assert plan(vllm_config, groups, MEMORY) == stock
        assert plan(**named) == stock
    else:
        assert plan(vllm_config, groups, specs, MEMORY) == stock
        assert plan(**named, kv_cache_specs=specs) == stock
    assert old_calls() == 2


def test_a_layout_is_settled_with_the_executor_of_the_configuration(apply_shim: ApplyShim, vllm_config: Any) -> None:
    if not has_layout(vllm_config):
        pytest.skip("this release settles no layout")
    from vllm.v1.core import kv_cache_utils

    vllm_config.cache_config.kv_cache_layout = None
    groups = parts.make_groups()
    old_calls = apply_shim(PATCH)
    with pytest.raises(ValueError, match="layout has not been resolved"):
        kv_cache_utils.get_kv_cache_config_from_groups(vllm_config, groups, MEMORY)
    executor = Executor(vllm_config)
    note_executor(executor)
    planned = kv_cache_utils.get_kv_cache_config_from_groups(vllm_config, groups, MEMORY)
    assert planned.num_blocks > 0
    assert executor.published == ["LBHNC"] == [vllm_config.cache_config.kv_cache_layout]
    assert old_calls() == 1
    kv_cache_utils.get_kv_cache_config_from_groups(vllm_config, groups, MEMORY)
    assert old_calls() == 1


def test_positional_arguments_by_what_they_are() -> None:
    assert name_positional((1, 2, {}, 4)) == {
        "vllm_config": 1,
        "kv_cache_groups": 2,
        "kv_cache_specs": {},
        "available_memory": 4,
    }
    assert name_positional((1, 2, 4)) == {"vllm_config": 1, "kv_cache_groups": 2, "available_memory": 4}
    with pytest.raises(TypeError, match="got 4 arguments"):
        name_positional((1, 2, 3, 4))
