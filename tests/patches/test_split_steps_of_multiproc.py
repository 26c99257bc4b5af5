"""0.11.0's MultiprocExecutor gives its step in the second phase too."""

from __future__ import annotations

from tests.patches.conftest import ApplyShim
from tests.patches.steps import Step
from vllm_overlay.patches.split_steps import PATCH as SPLIT
from vllm_overlay.patches.split_steps_of_multiproc import PATCH


def test_on_the_real_executor(apply_shim: ApplyShim) -> None:
    apply_shim(PATCH)
    old_calls = apply_shim(SPLIT)
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    executor = MultiprocExecutor.__new__(MultiprocExecutor)
    executor.has_connector, executor.output_rank = False, 0
    executor.collective_rpc = lambda method, **kwargs: [method]
    assert executor.execute_model(Step()) == "execute_model"
    assert old_calls() == 0
    assert executor.sample_tokens(None) == "execute_model"
    assert old_calls() == 1
