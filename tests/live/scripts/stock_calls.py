"""A user's script: plain and structured outputs from `LLM.generate`; it knows nothing of the overlay.

usage: stock_calls.py PLAN.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

if __name__ == "__main__":
    from vllm import LLM, SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    plan = json.loads(Path(sys.argv[1]).read_text())
    llm = LLM(**plan["engine"])
    prompts = [{"prompt_token_ids": ids} for ids in plan["prompts"]]
    plain = SamplingParams(temperature=0.0, max_tokens=plan["max_tokens"], ignore_eos=True)
    constrained = SamplingParams(
        temperature=0.0,
        max_tokens=plan["max_tokens"],
        structured_outputs=StructuredOutputsParams(regex=plan["regex"]),
    )
    outputs = llm.generate(prompts, plain, use_tqdm=False) + llm.generate(prompts[:1], constrained, use_tqdm=False)
    Path(plan["out"]).write_text(json.dumps([list(output.outputs[0].token_ids) for output in outputs]))
