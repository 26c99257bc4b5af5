"""vLLM from 0.12.0 on: a second model runner, off by default, and parallel prefill contexts. The rest as in 0.11.1."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm_overlay.compat.since_0_11_1 import *  # noqa: F403


def runner_style(worker: Any) -> str:
    """`V1` or `V2`: which model runner the worker has."""
    return "V2" if worker.use_v2_model_runner else "V1"


def sharding_option(vllm_config: Any) -> str | None:
    """As in 0.11.0; the option has another name."""
    return "pass_config.enable_sp" if vllm_config.compilation_config.pass_config.enable_sp else None


def settle_block_sizes(kv_cache_config: Any, vllm_config: Any) -> Mapping[str, int]:
    """The configuration's block size, for all ranks of context parallelism."""
    parallel = vllm_config.parallel_config
    ranks = parallel.decode_context_parallel_size * parallel.prefill_context_parallel_size
    return {"block_size": vllm_config.cache_config.block_size * ranks}
