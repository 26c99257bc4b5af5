"""A user's scripts: a target alone, and then with one draft after the other, each in a fork.

usage: serve_exported.py PLAN.json; the plan holds `engine` (keyword arguments), `drafts` (folders by name), `prompts`
as token ids, `max_tokens` of each prompt, and `out`. There goes, by draft and under `alone`, what `serve` returns.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

from forks import answer_in_fork, register_own_models

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


if __name__ == "__main__":
    import vllm.v1.engine.llm_engine
    import vllm.v1.worker.cpu_worker  # noqa: F401
    from vllm import LLM  # noqa: F401

    plan = json.loads(Path(sys.argv[1]).read_text())
    out = Path(plan["out"])
    register_own_models(ARCHITECTURES)
    drafts = {"alone": None, **plan["drafts"]}
    found = {name: answer_in_fork(name, out.parent, partial(serve, plan, draft)) for name, draft in drafts.items()}
    out.write_text(json.dumps(found))
