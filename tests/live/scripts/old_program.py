"""A program of 2025 that drives vLLM's parts by hand, as 0.11.0 took them; it knows nothing of the overlay.

usage: old_program.py PLAN.json. `config` is "by hand" or "engine arguments". `form` is "one phase" (0.11.0), or "two
phases" and "two phases, unasked" (0.11.1: schedulers are given their block size, and the second phase is asked for when
a step is unfinished, or always).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

# What the CPU kernels of every release take.
BLOCK_SIZE = 32
KV_CACHE_BYTES = 1 << 24


def build_config(model: str) -> Any:
    from vllm.config import (
        CacheConfig,
        DeviceConfig,
        LoadConfig,
        ModelConfig,
        ParallelConfig,
        SchedulerConfig,
        VllmConfig,
    )

    return VllmConfig(
        model_config=ModelConfig(model=model, tokenizer=model, dtype="float32", max_model_len=128, enforce_eager=True),
        cache_config=CacheConfig(block_size=BLOCK_SIZE, enable_prefix_caching=False),
        parallel_config=ParallelConfig(),
        scheduler_config=SchedulerConfig(max_num_seqs=8, max_model_len=128, max_num_batched_tokens=256),
        device_config=DeviceConfig(),
        load_config=LoadConfig(),
    )


def build_config_of_engine_arguments(model: str) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    return EngineArgs(
        model=model,
        dtype="float32",
        max_model_len=128,
        enforce_eager=True,
        block_size=BLOCK_SIZE,
        enable_prefix_caching=False,
        max_num_seqs=8,
    ).create_engine_config()


def build_executor(kind: str, vllm_config: Any) -> Any:
    from vllm.v1.executor.abstract import UniProcExecutor
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    return {"uni": UniProcExecutor, "mp": MultiprocExecutor}[kind](vllm_config=vllm_config)


def build_scheduler(vllm_config: Any, executor: Any, form: str) -> Any:
    from vllm.v1.core.kv_cache_utils import (
        _get_kv_cache_groups_uniform_spec,
        get_kv_cache_config_from_groups,
        unify_hybrid_kv_cache_specs,
    )
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.structured_output import StructuredOutputManager

    specs = executor.collective_rpc("get_kv_cache_spec")[0]
    unify_hybrid_kv_cache_specs(specs)
    groups = _get_kv_cache_groups_uniform_spec(specs)
    kv_cache_config = get_kv_cache_config_from_groups(vllm_config, groups, specs, KV_CACHE_BYTES)
    vllm_config.cache_config.num_gpu_blocks = kv_cache_config.num_blocks
    manager = StructuredOutputManager(vllm_config)
    sizes = {} if form == "one phase" else {"block_size": BLOCK_SIZE}
    scheduler = Scheduler(vllm_config, kv_cache_config, manager, **sizes)
    executor.initialize_from_config([kv_cache_config])
    return scheduler


def add_plain(scheduler: Any, plan: dict[str, Any]) -> None:
    from vllm import SamplingParams
    from vllm.v1.request import Request

    for i, prompt in enumerate(plan["prompts"]):
        params = SamplingParams(temperature=0.0, max_tokens=plan["max_tokens"])
        scheduler.add_request(Request(f"plain-{i}", prompt, params, None, eos_token_id=plan["eos_token_id"]))


def add_constrained(scheduler: Any, plan: dict[str, Any]) -> None:
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams
    from vllm.v1.request import Request
    from vllm.v1.structured_output.request import StructuredOutputRequest

    constraints = StructuredOutputsParams(regex=plan["regex"])
    constraints._backend = plan["backend"]
    params = SamplingParams(temperature=0.0, max_tokens=plan["max_tokens"], structured_outputs=constraints)
    request = Request(
        request_id="constrained",
        prompt_token_ids=plan["prompts"][0],
        sampling_params=params,
        pooling_params=None,
        eos_token_id=plan["constrained_eos_token_id"],
        structured_output_request=StructuredOutputRequest(sampling_params=params),
    )
    scheduler.structured_output_manager.grammar_init(request)
    scheduler.add_request(request)


def execute(executor: Any, scheduler: Any, step: Any, form: str) -> Any:
    if form == "one phase":
        return executor.execute_model(step)
    grammar_output = scheduler.get_grammar_bitmask(step)
    output = executor.execute_model(step)
    if (form == "two phases" and output is None) or (form != "two phases" and step.total_num_scheduled_tokens):
        output = executor.sample_tokens(grammar_output)
    return output


def run(executor: Any, scheduler: Any, form: str) -> tuple[dict[str, Any], int]:
    """Answers by request, and how many steps had no token in them."""
    answers: dict[str, Any] = {}
    empty_steps = 0
    while scheduler.has_requests():
        step = scheduler.schedule()
        output = execute(executor, scheduler, step, form)
        assert isinstance(output.sampled_token_ids, list), output
        empty_steps += not step.total_num_scheduled_tokens
        for outputs in scheduler.update_from_output(step, output).values():
            for one in outputs.outputs:
                answer = answers.setdefault(one.request_id, {"token_ids": [], "reason": None})
                answer["token_ids"] += [int(token) for token in one.new_token_ids]
                answer["reason"] = None if one.finish_reason is None else str(one.finish_reason)
    return answers, empty_steps


def read_embeddings(executor: Any, token_ids: list[int]) -> bool:
    """Whether the inner model answers to both names of its embedding method, with the same values."""
    import torch

    inner = executor.driver_worker.worker.model_runner.model.model
    ids = torch.tensor(token_ids)
    return bool(torch.equal(inner.get_input_embeddings(ids), inner.embed_input_ids(ids)))


if __name__ == "__main__":
    plan = json.loads(Path(sys.argv[1]).read_text())
    build = {"by hand": build_config, "engine arguments": build_config_of_engine_arguments}[plan["config"]]
    vllm_config = build(plan["model"])
    executor = build_executor(plan["executor"], vllm_config)
    try:
        scheduler = build_scheduler(vllm_config, executor, plan["form"])
        answers, empty_steps = {}, 0
        # One after the other: vLLM's CPU runner takes a bitmask for all of a step's requests or none.
        for add in (add_plain, add_constrained):
            add(scheduler, plan)
            more, empty = run(executor, scheduler, plan["form"])
            answers |= more
            empty_steps += empty
        both_names = read_embeddings(executor, plan["prompts"][0]) if plan["executor"] == "uni" else None
    finally:
        # A worker in this process ends with it; 0.20.2's shutdown asks torch for a GPU where torch is built for one.
        if plan["executor"] == "mp":
            executor.shutdown()
    facts = {"answers": answers, "empty_steps": empty_steps, "both_names": both_names}
    Path(plan["out"]).write_text(json.dumps(facts))
