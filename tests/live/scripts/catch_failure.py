"""A user's script whose worker fails: what its callers get, and when.

usage: catch_failure.py ENGINE.json OUT.json; OUT holds, by call, the error's type, its text and the seconds that it
took from the worker to here.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ERRORS: dict[str, tuple[str, str, float]] = {}


@contextmanager
def caught_as(name: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # noqa: BLE001  what it is, is the question
        failed = float(Path(os.environ["FAIL_CLOCK"]).read_text())
        ERRORS[name] = type(error).__name__, str(error), time.time() - failed


def run(engine: dict[str, Any]) -> None:
    from vllm import LLM, SamplingParams

    llm = LLM(**engine, worker_cls="failing_worker.FailingWorker")
    with caught_as("call"):
        llm.collective_rpc("fail")
    with caught_as("generate"):
        llm.generate([{"prompt_token_ids": [5, 6, 7]}], SamplingParams(max_tokens=2, detokenize=False), use_tqdm=False)


if __name__ == "__main__":
    with caught_as("start"):
        run(json.loads(Path(sys.argv[1]).read_text()))
    Path(sys.argv[2]).write_text(json.dumps(ERRORS))
