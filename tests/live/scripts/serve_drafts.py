"""A user's script: serves a target with one draft after the other, as far as vLLM lets it.

usage: serve_drafts.py PLAN.json; the plan holds `refused` (pairs of draft and model), `draft` and `model` (which are
served), `prompts` as token ids, `max_tokens` of each prompt, and `out`, where this goes: `refusals`, the generated
`token_ids`, and vLLM's own counters `num_drafts` and `accepted_per_position`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from vllm_overlay.errors import OverlayError

NUM_DRAFT_TOKENS = 3


def start(draft: str, model: str) -> Any:
    from vllm import LLM

    speculative = {"method": "eagle3", "model": draft, "num_speculative_tokens": NUM_DRAFT_TOKENS}
    options = {"dtype": "float32", "enforce_eager": True, "max_model_len": 256, "disable_log_stats": False}
    return LLM(model, speculative_config=speculative, **options)


def find_refusal(draft: str, model: str) -> str:
    try:
        start(draft, model)
    except OverlayError as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def generate(llm: Any, plan: dict[str, Any]) -> dict[str, Any]:
    from vllm import SamplingParams

    params = [SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=count) for count in plan["max_tokens"]]
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in plan["prompts"]], params, use_tqdm=False)
    metrics = {metric.name: metric for metric in llm.get_metrics()}
    accepted = metrics["vllm:spec_decode_num_accepted_tokens_per_pos"].values
    return {
        "token_ids": [list(output.outputs[0].token_ids) for output in outputs],
        "num_drafts": metrics["vllm:spec_decode_num_drafts"].value,
        "accepted_per_position": list(accepted)[:NUM_DRAFT_TOKENS],
    }


if __name__ == "__main__":
    plan = json.loads(Path(sys.argv[1]).read_text())
    refusals = [find_refusal(draft, model) for draft, model in plan["refused"]]
    served = generate(start(plan["draft"], plan["model"]), plan)
    Path(plan["out"]).write_text(json.dumps({"refusals": refusals, **served}))
