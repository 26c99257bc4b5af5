"""Engines one after the other, each in a fork of a process that has imported vLLM: nothing is imported twice."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any


def answer_in_fork(name: str, folder: Path, run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What `run` returns in a fork, by way of `folder`, where what it prints goes too.

    Errors: RuntimeError with the end of that if it dies.
    """
    answer, log = folder / f"{name}.json", folder / f"{name}.log"
    child = os.fork()
    if child == 0:
        output = os.open(log, os.O_WRONLY | os.O_CREAT)
        os.dup2(output, 1)
        os.dup2(output, 2)
        answer.write_text(json.dumps(run()))
        os._exit(0)
    os.waitpid(child, 0)
    if not answer.is_file():
        raise RuntimeError(f"the engine {name!r} left no answer: {log.read_text()[-3000:]}")
    found: dict[str, Any] = json.loads(answer.read_text())
    return found


def register_own_models(architectures: Iterable[str]) -> None:
    """vLLM's own, or it would import itself once more in another process to ask each of them a few questions."""
    from vllm.model_executor.models import ModelRegistry

    for name in architectures:
        ModelRegistry.register_model(name, ModelRegistry.models[name].load_model_cls())
