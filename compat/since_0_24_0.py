"""Where things live in vLLM from 0.24.0 on: Model Runner V2 serves the dense models, beside V1."""

from __future__ import annotations

from typing import Any

from vllm_overlay.compat import since_0_16_0
from vllm_overlay.compat.since_0_16_0 import (
    ENGINE_CORE,
    ENGINE_PROCESSES,
    ENVS,
    PARALLEL_CONFIG,
    SCHEDULER,
    VLLM_CONFIG,
    WORKER,
    block_copies,
    full_attention_group,
    runner_style,
)

__all__ = [
    "CAPTURED_RUNNERS",
    "ENGINE_CORE",
    "ENGINE_PROCESSES",
    "ENVS",
    "PARALLEL_CONFIG",
    "SCHEDULER",
    "SPECULATIVE_DECODING_ON_CPU",
    "VLLM_CONFIG",
    "WORKER",
    "block_copies",
    "external_request_id",
    "full_attention_group",
    "runner_style",
    "step_order",
    "step_token_ids",
]

SPECULATIVE_DECODING_ON_CPU = False
CAPTURED_RUNNERS = ("V1", "V2")


def external_request_id(internal_id: str) -> str:
    """As in 0.16.0, unless the user asked vLLM to leave ids as they are."""
    from vllm import envs

    return internal_id if envs.VLLM_DISABLE_REQUEST_ID_RANDOMIZATION else since_0_16_0.external_request_id(internal_id)


def step_order(worker: Any) -> tuple[str, ...]:
    """As in 0.16.0; V2 sorts each step's requests by their token count and keeps the order with the step's state."""
    if runner_style(worker) == "V1":
        return since_0_16_0.step_order(worker)
    return tuple(worker.model_runner.execute_model_state.input_batch.req_ids)


def step_token_ids(worker: Any) -> Any:
    """As in 0.16.0; V2 keeps them with the step's state."""
    if runner_style(worker) == "V1":
        return since_0_16_0.step_token_ids(worker)
    return worker.model_runner.execute_model_state.input_batch.input_ids
