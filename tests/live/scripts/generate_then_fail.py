"""A user's script, with a worker extension of the user's own: some batches, a look around, and a step that fails.

usage: generate_then_fail.py PLAN.json; the plan is that of generate.py, and may hold `break_with`, a method of
BreakableWorker and its arguments, in place of `break_steps`. The answer holds `batches` (of requests),
`traces` by process, and `error`: the type and text of what the caller of `generate` got.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

from traces import find_traces

# What the front end of an engine need not have imported, and patches are made in.
LOOKED_INTO = ("vllm.config", "vllm.entrypoints.llm", "vllm.v1.engine.core", "vllm.v1.worker.gpu_worker")

if __name__ == "__main__":
    from vllm import LLM, SamplingParams

    plan = json.loads(Path(sys.argv[1]).read_text())
    llm = LLM(**plan["engine"], worker_extension_cls="breakable_worker.BreakableWorker")
    batches = []
    for batch in plan["batches"]:
        outputs = llm.generate(
            [{"prompt_token_ids": ids} for ids in batch["prompts"]],
            SamplingParams(temperature=0.0, detokenize=False, **batch["params"]),
            use_tqdm=False,
        )
        batches.append([{"id": one.request_id, "token_ids": list(one.outputs[0].token_ids)} for one in outputs])
    for name in LOOKED_INTO:
        importlib.import_module(name)
    traces = {"front end": find_traces(), "worker": llm.collective_rpc("find_traces")[0]}
    method, *arguments = plan.get("break_with", ["break_steps"])
    llm.collective_rpc(method, args=tuple(arguments))
    try:
        llm.generate([{"prompt_token_ids": [5, 6, 7]}], SamplingParams(max_tokens=2, detokenize=False), use_tqdm=False)
    except Exception as caught:  # noqa: BLE001  what it is, is the question
        error = [type(caught).__name__, str(caught)]
    else:
        error = ["", ""]
    Path(plan["out"]).write_text(json.dumps({"batches": batches, "traces": traces, "error": error}))
