"""vLLM from 0.24.0 on: Model Runner V2 serves the dense models, beside V1. The rest as in 0.20.0."""

from __future__ import annotations

from typing import Any

from vllm_overlay.compat import since_0_20_0
from vllm_overlay.compat.since_0_20_0 import *  # noqa: F403
from vllm_overlay.compat.since_0_20_0 import runner_style

CAPTURED_RUNNERS: tuple[str, ...] = ("V1", "V2")


def step_order(worker: Any) -> tuple[str, ...]:
    """As in 0.11.0; V2 sorts each step's requests by their token count and keeps the order with the step's state."""
    if runner_style(worker) == "V1":
        return since_0_20_0.step_order(worker)
    return tuple(worker.model_runner.execute_model_state.input_batch.req_ids)


def step_token_ids(worker: Any) -> Any:
    """As in 0.11.0; V2 keeps them with the step's state."""
    if runner_style(worker) == "V1":
        return since_0_20_0.step_token_ids(worker)
    return worker.model_runner.execute_model_state.input_batch.input_ids
