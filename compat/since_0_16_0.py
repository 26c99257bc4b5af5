"""Where things live in vLLM from 0.16.0 on."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

ENVS = "vllm.envs"
PARALLEL_CONFIG = "vllm.config.parallel"
VLLM_CONFIG = "vllm.config.vllm"
SCHEDULER = "vllm.v1.core.sched.scheduler"
ENGINE_CORE = "vllm.v1.engine.core"
ENGINE_PROCESSES = "vllm.v1.engine.utils"
WORKER = "vllm.v1.worker.gpu_worker"

# CPUModelRunner asserts that there is no speculative_config.
SPECULATIVE_DECODING_ON_CPU = False

# Model Runner V2 is an experiment here, off by default, and keeps a step's state in an untyped tuple.
CAPTURED_RUNNERS = ("V1",)

# The input processor appends "-" and eight hexadecimal digits to the caller's id, so that ids are unique.
_RANDOM_SUFFIX = re.compile(r"-[0-9a-f]{8}$")


def external_request_id(internal_id: str) -> str:
    """The id that the caller gave, from the engine's own."""
    return _RANDOM_SUFFIX.sub("", internal_id)


def runner_style(worker: Any) -> str:
    """`V1` or `V2`: which model runner the worker has."""
    return "V2" if worker.use_v2_model_runner else "V1"


def step_order(worker: Any) -> tuple[str, ...]:
    """The engine's ids of the requests of the step just computed: V1's persistent batch, after its re-ordering."""
    batch = worker.model_runner.input_batch
    return tuple(batch.req_ids[: batch.num_reqs])


def step_token_ids(worker: Any) -> Any:
    """The token of every row of the step just computed, int32 `[max tokens]`, on the model's device."""
    return worker.model_runner.input_ids.gpu


def full_attention_group(kv_cache_config: Any) -> tuple[int, int] | None:
    """(index, block size) of the first group with full attention; one of several layer kinds holds specs in a dict."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    for index, group in enumerate(kv_cache_config.kv_cache_groups):
        spec = group.kv_cache_spec
        inner = getattr(spec, "kv_cache_specs", None)
        if any(isinstance(one, FullAttentionSpec) for one in (inner.values() if inner else [spec])):
            return index, int(spec.block_size)
    return None


def block_copies(scheduler_output: object) -> Sequence[tuple[int, int]]:
    """No KV block is copied before a step in this release line."""
    return ()
