"""Where things live in vLLM 0.11.0, and how its one-phase engine tells of a step."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

ENGINE_CORE = "vllm.v1.engine.core"
ENGINE_EXCEPTIONS = "vllm.v1.engine.exceptions"
ENGINE_PROCESSES = "vllm.v1.engine.utils"
ENVS = "vllm.envs"
EXECUTOR = "vllm.v1.executor.abstract"
KV_CACHE_PLANNING = "vllm.v1.core.kv_cache_utils"
KV_CACHE_UTILS = "vllm.v1.core.kv_cache_utils"
LAUNCHER = "vllm.entrypoints.launcher"
MODEL_INTERFACES = "vllm.model_executor.models.interfaces"
MODEL_LOADER = "vllm.model_executor.model_loader.base_loader"
MULTIPROC_EXECUTOR = "vllm.v1.executor.multiproc_executor"
PARALLEL_CONFIG = "vllm.config.parallel"
PROMETHEUS = "vllm.v1.metrics.prometheus"
RAY_EXECUTOR = "vllm.v1.executor.ray_distributed_executor"
REQUEST = "vllm.v1.request"
SCHEDULER = "vllm.v1.core.sched.scheduler"
SCHEDULER_CONFIG = "vllm.config.scheduler"
SCHEDULER_OUTPUT = "vllm.v1.core.sched.output"
SPECULATIVE_CONFIG = "vllm.config.speculative"
STRUCTURED_OUTPUT_REQUEST = "vllm.v1.structured_output.request"
UNIPROC_EXECUTOR = "vllm.v1.executor.abstract"
VLLM_CONFIG = "vllm.config"
WORKER = "vllm.v1.worker.gpu_worker"
WORKER_BASE = "vllm.v1.worker.worker_base"

# CPUModelRunner asserts that there is no speculative_config.
SPECULATIVE_DECODING_ON_CPU = False

CAPTURED_RUNNERS: tuple[str, ...] = ("V1",)

RENAMED_MODEL_METHODS: Mapping[str, str] = {
    "embed_input_ids": "get_input_embeddings",
    "embed_multimodal": "get_multimodal_embeddings",
    "get_eagle3_default_aux_hidden_state_layers": "get_eagle3_aux_hidden_state_layers",
}


def external_request_id(internal_id: str) -> str:
    """The id that the caller gave: the engine uses it as it is."""
    return internal_id


def runner_style(worker: Any) -> str:
    """There is one model runner."""
    return "V1"


def step_order(worker: Any) -> tuple[str, ...]:
    """The engine's ids of the requests of the step just computed: V1's persistent batch, after its re-ordering."""
    batch = worker.model_runner.input_batch
    return tuple(batch.req_ids[: batch.num_reqs])


def step_token_ids(worker: Any) -> Any:
    """The token of every row of the step just computed, int32 `[max tokens]`, on the model's device."""
    return worker.model_runner.input_ids.gpu


def resumed_requests(cached_requests: Any) -> Collection[str]:
    """The engine's ids of the requests that come back after a pre-emption: a flag beside each id."""
    flags = zip(cached_requests.req_ids, cached_requests.resumed_from_preemption, strict=True)
    return {request_id for request_id, resumed in flags if resumed}


def worker_place(num_hidden_layers: int) -> tuple[int, int, tuple[tuple[int, int], ...]]:
    """(rank in its tensor-parallel group, pipeline stage, [first, end) layers of each stage) of this worker."""
    from vllm.distributed.parallel_state import get_pp_group, get_tp_group
    from vllm.distributed.utils import get_pp_indices

    stages = get_pp_group()
    layers = (get_pp_indices(num_hidden_layers, stage, stages.world_size) for stage in range(stages.world_size))
    return get_tp_group().rank_in_group, stages.rank_in_group, tuple((first, end) for first, end in layers)


def sharding_option(vllm_config: Any) -> str | None:
    """The option that makes tensor-parallel ranks hold parts of the residual stream; None if each holds it whole."""
    shards = vllm_config.compilation_config.pass_config.enable_sequence_parallelism
    return "pass_config.enable_sequence_parallelism" if shards else None


def full_attention_group(kv_cache_config: Any) -> tuple[int, int] | None:
    """(index, block size) of the first group with full attention; one of several layer kinds holds specs in a dict."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    for index, group in enumerate(kv_cache_config.kv_cache_groups):
        spec = group.kv_cache_spec
        inner = getattr(spec, "kv_cache_specs", None)
        if any(isinstance(one, FullAttentionSpec) for one in (inner.values() if inner else [spec])):
            return index, int(spec.block_size)
    return None


def settle_block_sizes(kv_cache_config: Any, vllm_config: Any) -> Mapping[str, int]:
    """The block size that the scheduler uses: the configuration's, for all ranks of decode context parallelism."""
    ranks = vllm_config.parallel_config.decode_context_parallel_size
    return {"block_size": vllm_config.cache_config.block_size * ranks}


def settle_kv_cache_layout(vllm_config: Any, executor: Any, kv_cache_specs: Iterable[Any]) -> bool:
    """Each worker chooses the layout of its KV cache in this release line."""
    return False


def block_copies(scheduler_output: Any) -> Sequence[tuple[int, int]]:
    """No KV block is copied before a step in this release line."""
    return ()


def fed_layer_ids(asked: Sequence[int], num_hidden_layers: int) -> tuple[int, ...]:
    """The default of every model class, whatever the draft's config.json asks for: the runner does not read it."""
    return tuple(sorted({2, num_hidden_layers // 2, num_hidden_layers - 3}))
