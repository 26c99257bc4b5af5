"""vLLM's parts built by hand, in the form of this environment's release, for tests of shims: no engine, no weights."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch

from tests.tiny_models import write_tiny_llama

BLOCK_SIZE = 16


def make_vllm_config(folder: Path, **scheduling: Any) -> Any:
    """The configuration of a tiny Llama on the CPU, with a scheduler configuration in the release's own form."""
    from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig

    model = folder / "model"
    if not model.exists():
        write_tiny_llama(model, layers=1)
    make_scheduler_config = getattr(SchedulerConfig, "default_factory", SchedulerConfig)
    cache_config = CacheConfig(block_size=BLOCK_SIZE, enable_prefix_caching=False)
    cache_config.num_gpu_blocks = 64
    return VllmConfig(
        model_config=ModelConfig(
            model=str(model), dtype="float32", max_model_len=128, skip_tokenizer_init=True, enforce_eager=True
        ),
        cache_config=cache_config,
        scheduler_config=make_scheduler_config(
            max_num_seqs=8, max_num_batched_tokens=256, max_model_len=128, **scheduling
        ),
    )


def make_spec(block_size: int = BLOCK_SIZE, **more: Any) -> Any:
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    facts = {"block_size": block_size, "num_kv_heads": 1, "head_size": 16, "dtype": torch.float32, "use_mla": False}
    known = {field.name for field in dataclasses.fields(FullAttentionSpec)}
    return FullAttentionSpec(**{name: value for name, value in facts.items() if name in known}, **more)


def make_groups(*block_sizes: int) -> list[Any]:
    from vllm.v1.kv_cache_interface import KVCacheGroupSpec

    return [KVCacheGroupSpec([f"layer {i}"], make_spec(size)) for i, size in enumerate(block_sizes or (BLOCK_SIZE,))]


def make_scheduler_arguments(folder: Path, **scheduling: Any) -> dict[str, Any]:
    """What a Scheduler of 0.11.0 is built with."""
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.structured_output import StructuredOutputManager

    vllm_config = make_vllm_config(folder, **scheduling)
    return {
        "vllm_config": vllm_config,
        "kv_cache_config": KVCacheConfig(num_blocks=64, kv_cache_tensors=[], kv_cache_groups=make_groups()),
        "structured_output_manager": StructuredOutputManager(vllm_config),
    }


def make_request(request_id: str = "a", **more: Any) -> Any:
    """A request of three tokens, with nothing that a release dropped."""
    import inspect

    from vllm import SamplingParams
    from vllm.v1.request import Request

    facts = {"sampling_params": SamplingParams(max_tokens=4), "pooling_params": None} | more
    if "eos_token_id" in inspect.signature(Request.__init__).parameters:
        facts.setdefault("eos_token_id", None)
    return Request(request_id=request_id, prompt_token_ids=[1, 2, 3], **facts)
