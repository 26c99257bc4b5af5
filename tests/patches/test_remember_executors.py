"""An executor is found by its configuration while it lives."""

from __future__ import annotations

import gc

import pytest

from tests.patches.conftest import ApplyShim
from vllm_overlay.old_programs import find_executor
from vllm_overlay.patches.remember_executors import PATCH, build


class Config:
    pass


class Executor:
    @build
    def __init__(self, vllm_config: Config, fail: bool = False) -> None:
        if fail:
            raise RuntimeError("no room")
        self.vllm_config = vllm_config


def test_by_its_very_configuration() -> None:
    config, other = Config(), Config()
    first, second = Executor(config), Executor(other)
    assert find_executor(config) is first
    assert find_executor(other) is second
    del first
    gc.collect()
    assert find_executor(config) is None


def test_one_that_was_not_built_is_not_remembered() -> None:
    config = Config()
    with pytest.raises(RuntimeError, match="no room"):
        Executor(config, fail=True)
    assert find_executor(config) is None


def test_it_fits_this_vllm(apply_shim: ApplyShim) -> None:
    apply_shim(PATCH)
