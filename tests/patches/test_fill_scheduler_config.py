"""A `SchedulerConfig` of 0.11 is what it was there, and one of the release's own form is untouched."""

from __future__ import annotations

from typing import Any

import pytest

from tests.patches.conftest import ApplyShim
from vllm_overlay.old_programs import is_old_program
from vllm_overlay.patches.fill_scheduler_config import PATCH


class Program:
    """As much of a VllmConfig as is asked for."""

    def __init__(self, scheduler_config: Any) -> None:
        self.scheduler_config = scheduler_config


def test_the_call_of_speculators_holds_whole_prompts(apply_shim: ApplyShim) -> None:
    from vllm.config import SchedulerConfig

    old_calls = apply_shim(PATCH)
    config = SchedulerConfig(max_num_seqs=32, max_model_len=2048, max_num_batched_tokens=8192)
    assert (config.max_num_seqs, config.max_num_batched_tokens) == (32, 8192)
    assert config.enable_chunked_prefill is False
    assert config.async_scheduling is False
    assert old_calls() == 1
    assert is_old_program(Program(config))


@pytest.mark.parametrize(
    ("given", "tokens", "chunked"),
    [
        ({}, 8192, False),
        ({"max_model_len": None, "max_num_batched_tokens": None, "max_num_seqs": None}, 8192, False),
        ({"max_model_len": 4096, "enable_chunked_prefill": None}, 4096, False),
        ({"max_model_len": 100}, 2048, False),
        ({"max_model_len": 4096, "max_num_batched_tokens": 2048}, 2048, True),
        ({"enable_chunked_prefill": True}, 2048, True),
    ],
)
def test_what_is_left_out_is_as_in_0_11(
    apply_shim: ApplyShim, given: dict[str, Any], tokens: int, chunked: bool
) -> None:
    from vllm.config import SchedulerConfig

    apply_shim(PATCH)
    config = SchedulerConfig(**given)
    assert config.max_num_batched_tokens == tokens
    assert config.enable_chunked_prefill is chunked


def test_positional_fields_of_0_11(apply_shim: ApplyShim) -> None:
    from vllm.config import SchedulerConfig

    old_calls = apply_shim(PATCH)
    config = SchedulerConfig("generate", 4096, 16, max_model_len=1024)
    assert (config.runner_type, config.max_num_batched_tokens, config.max_num_seqs) == ("generate", 4096, 16)
    assert old_calls() == 1
    with pytest.raises(TypeError, match="name the fields after max_num_seqs"):
        SchedulerConfig("generate", 4096, 16, 1024)


def test_a_field_that_is_gone_is_refused(apply_shim: ApplyShim) -> None:
    from vllm.config import SchedulerConfig

    apply_shim(PATCH)
    with pytest.raises(TypeError, match="has no num_lookahead_slots"):
        SchedulerConfig(max_model_len=1024, num_lookahead_slots=1)


def test_the_newer_form_goes_straight_through(apply_shim: ApplyShim) -> None:
    from vllm.config import SchedulerConfig

    stock = SchedulerConfig(max_model_len=2048, is_encoder_decoder=False)
    old_calls = apply_shim(PATCH)
    for config in (
        SchedulerConfig(max_model_len=2048, is_encoder_decoder=False),
        SchedulerConfig(2048, False),
        SchedulerConfig.default_factory(max_model_len=2048),
    ):
        assert config == stock
        assert not is_old_program(Program(config))
    assert old_calls() == 0
