"""A user's scripts: a target alone, and then with one draft after the other.

Each runs in a fork of a process that has imported everything: nothing is imported twice.

usage: serve_exported.py PLAN.json; the plan holds `engine` (keyword arguments), `drafts` (folders by name), `prompts`
as token ids, `max_tokens` of each prompt, and `out`. There goes, by draft and under `alone`, what `serve` returns.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

NUM_DRAFT_TOKENS = 3
# Of the target, and of a draft in the plain form and in speculators'.
ARCHITECTURES = ("LlamaForCausalLM", "LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")


def serve(plan: dict[str, Any], draft: str | None) -> dict[str, Any]:
    """The generated `token_ids`, and of a draft vLLM's own counters; or `error`, its type and text."""
    from vllm import LLM

    speculative = {"method": "eagle3", "model": draft, "num_speculative_tokens": NUM_DRAFT_TOKENS} if draft else None
    try:
        llm = LLM(**plan["engine"], speculative_config=speculative, disable_log_stats=False)
        return {"token_ids": generate(llm, plan)} | (read_counters(llm) if draft else {})
    except Exception as error:  # noqa: BLE001  what it is, is the question
        return {"error": f"{type(error).__name__}: {error}"}


def generate(llm: Any, plan: dict[str, Any]) -> list[list[int]]:
    from vllm import SamplingParams

    params = [
        SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=count, detokenize=False)
        for count in plan["max_tokens"]
    ]
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in plan["prompts"]], params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def read_counters(llm: Any) -> dict[str, Any]:
    metrics = {metric.name: metric for metric in llm.get_metrics()}
    return {
        "num_drafts": metrics["vllm:spec_decode_num_drafts"].value,
        "num_draft_tokens": metrics["vllm:spec_decode_num_draft_tokens"].value,
        "accepted_per_position": metrics["vllm:spec_decode_num_accepted_tokens_per_pos"].values[:NUM_DRAFT_TOKENS],
    }


def serve_forked(plan: dict[str, Any], name: str, draft: str | None) -> dict[str, Any]:
    folder = Path(plan["out"]).parent
    answer, log = folder / f"{name}.json", folder / f"{name}.log"
    child = os.fork()
    if child == 0:
        output = os.open(log, os.O_WRONLY | os.O_CREAT)
        os.dup2(output, 1)
        os.dup2(output, 2)
        answer.write_text(json.dumps(serve(plan, draft)))
        os._exit(0)
    os.waitpid(child, 0)
    if not answer.is_file():
        raise RuntimeError(f"{name} left no answer: {log.read_text()[-3000:]}")
    found: dict[str, Any] = json.loads(answer.read_text())
    return found


def register_models() -> None:
    """Or vLLM would import itself once more in another process to ask each of them a few questions."""
    from vllm.model_executor.models import ModelRegistry

    for name in ARCHITECTURES:
        ModelRegistry.register_model(name, ModelRegistry.models[name].load_model_cls())


if __name__ == "__main__":
    import vllm.v1.engine.llm_engine
    import vllm.v1.worker.cpu_worker  # noqa: F401
    from vllm import LLM  # noqa: F401

    plan = json.loads(Path(sys.argv[1]).read_text())
    register_models()
    drafts = {"alone": None, **plan["drafts"]}
    Path(plan["out"]).write_text(json.dumps({name: serve_forked(plan, name, draft) for name, draft in drafts.items()}))
