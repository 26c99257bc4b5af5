"""0.33.0's planning answers at its old place. No engine of it runs here: its module is made up."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest

from tests.patches.conftest import ApplyShim
from vllm_overlay.patches.keep_kv_planning_in_utils import MOVED, NEW_HOME, PATCH


@pytest.fixture
def planning(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module: Any = ModuleType(NEW_HOME)
    module.unify_hybrid_kv_cache_specs = lambda kv_cache_spec: ("unified", kv_cache_spec)
    module.get_global_kv_cache_groups = lambda vllm_config, kv_cache_specs: ("groups", kv_cache_specs)
    module.get_kv_cache_configs = lambda *args: args
    monkeypatch.setitem(sys.modules, NEW_HOME, module)
    import vllm.v1.core

    monkeypatch.setattr(vllm.v1.core, "kv_cache_planning", module, raising=False)
    return module


def build(name: str) -> Any:
    place = f"{{KV_CACHE_UTILS}}:{name}"
    return next(one.build for one in PATCH.restores if one.place == place)()


def test_a_moved_function_is_called_where_it_is(planning: ModuleType) -> None:
    assert build("unify_hybrid_kv_cache_specs")(kv_cache_spec={"a": 1}) == ("unified", {"a": 1})


def test_configurations_get_the_groups_of_all_workers(planning: ModuleType) -> None:
    specs = [{"a": 1}, {"b": 2}]
    assert build("get_kv_cache_configs")("config", specs, [7, 8]) == ("config", specs, [7, 8], ("groups", specs))


def test_every_moved_function_is_where_it_was_in_earlier_releases() -> None:
    from vllm.v1.core import kv_cache_utils

    assert len(MOVED) == 14
    assert [name for name in MOVED if not callable(getattr(kv_cache_utils, name, None))] == []


def test_it_fits_this_vllm(apply_shim: ApplyShim) -> None:
    apply_shim(PATCH)
