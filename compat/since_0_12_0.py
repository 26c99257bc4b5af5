"""vLLM from 0.12.0 on: a second model runner, an experiment and off by default. The rest as in 0.11.1."""

from __future__ import annotations

from typing import Any

from vllm_overlay.compat.since_0_11_1 import *  # noqa: F403


def runner_style(worker: Any) -> str:
    """`V1` or `V2`: which model runner the worker has."""
    return "V2" if worker.use_v2_model_runner else "V1"
