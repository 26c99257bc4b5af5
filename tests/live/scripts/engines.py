"""Engines one after the other, each in a fork of a process that has imported everything: nothing is imported twice.

usage: engines.py PLAN.json OUT.json; the plan holds, by name, `engine` and `batches` as in generate.py and `variables`
of the environment; and `models`, the architectures of vLLM's own. OUT holds, by name, what `run` returns.
"""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

from case_models import CASE_MODELS
from forks import answer_in_fork, register_own_models
from generate import generate


def run(plan: dict[str, Any]) -> dict[str, Any]:
    """Of an engine in this process: its answers by batch, vLLM's own counters, its KV-cache groups as (kind, block
    size), and the error that it died of, as the call and the text; empty if it did not.
    """
    from vllm import LLM

    found: dict[str, Any] = {"batches": [], "counters": {}, "groups": [], "error": []}
    call = "start"
    try:
        llm = LLM(**plan["engine"])
        [found["groups"]] = llm.collective_rpc(list_groups)
        call = "generate"
        for batch in plan["batches"]:
            found["batches"].append(generate(llm, batch))
        found["counters"] = {
            metric.name: metric.value for metric in llm.get_metrics() if isinstance(getattr(metric, "value", None), int)
        }
        call = "close"
        llm.collective_rpc("overlay_close")
    except Exception as error:  # noqa: BLE001  what it is, is the question
        found["error"] = [call, f"{type(error).__name__}: {error}"]
    return found


def list_groups(worker: Any) -> list[tuple[str, int]]:
    groups = worker.model_runner.kv_cache_config.kv_cache_groups
    return [(type(group.kv_cache_spec).__name__, group.kv_cache_spec.block_size) for group in groups]


def run_anew(plan: dict[str, Any]) -> dict[str, Any]:
    activate_anew(plan["variables"])
    return run(plan)


def activate_anew(variables: dict[str, str]) -> None:
    """A fork has the settings of the process that it is a fork of."""
    from vllm_overlay import activation
    from vllm_overlay.settings import read_settings

    os.environ.update(variables)
    activation._STATE.settings = read_settings()


if __name__ == "__main__":
    import vllm.v1.engine.llm_engine
    import vllm.v1.worker.cpu_worker  # noqa: F401
    from vllm import LLM  # noqa: F401
    from vllm.model_executor.models import ModelRegistry

    file, out = map(Path, sys.argv[1:])
    whole = json.loads(file.read_text())
    for model in CASE_MODELS:
        ModelRegistry.register_model(model.__name__, model)
    register_own_models(whole["models"])
    found = {name: answer_in_fork(name, out.parent, partial(run_anew, one)) for name, one in whole["engines"].items()}
    out.write_text(json.dumps(found))
