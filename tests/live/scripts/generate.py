"""A user's script: it only calls `LLM(...).generate(...)`, and may hand requests their `extra_args["overlay"]`.

usage: generate.py PLAN.json; the plan holds `engine` (keyword arguments), `batches` (a list of calls, each with
`prompts` as token ids, `params`, and `overlays` for each prompt or none) and `out` (where the generated token ids go).
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any


def generate(llm: Any, batch: dict[str, Any]) -> dict[str, Any]:
    """One call: how long it took, and the id and the tokens of each request."""
    from vllm import SamplingParams

    params = [
        SamplingParams(temperature=0.0, detokenize=False, extra_args=extra, **batch["params"])
        for extra in [{"overlay": overlay} for overlay in batch["overlays"]] or [None] * len(batch["prompts"])
    ]
    started = time.perf_counter()
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in batch["prompts"]], params, use_tqdm=False)
    return {
        "seconds": time.perf_counter() - started,
        "requests": [{"id": output.request_id, "token_ids": list(output.outputs[0].token_ids)} for output in outputs],
    }


if __name__ == "__main__":
    from vllm import LLM

    plan = json.loads(Path(sys.argv[1]).read_text())
    llm = LLM(**plan["engine"])
    Path(plan["out"]).write_text(json.dumps([generate(llm, batch) for batch in plan["batches"]]))
