"""A rank that is killed while it captures: what the caller of `generate` gets, and what is left in the store."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.live.runs import ENGINE, LIMIT_S, SCRIPT, Answer, Batch, run_python
from vllm_overlay.store import Store

RANK = 1
# The last step that this rank begins is the second of a request of two tokens.
STEPS_BEFORE = 1


@dataclass(frozen=True)
class Killed:
    """The answers of the batches before, and the error: its type and text."""

    answers: list[list[Answer]]
    kind: str
    text: str


def kill_a_rank(
    folder: Path,
    model: Path,
    batches: list[Batch],
    environment: dict[str, str],
    limit: float = LIMIT_S,
    **engine: Any,
) -> Killed:
    """Generate the batches, then a request in whose second step rank 1 is killed."""
    folder.mkdir(parents=True, exist_ok=True)
    plan, out = folder / "plan.json", folder / "out.json"
    plan.write_text(
        json.dumps(
            {
                "engine": ENGINE | {"model": str(model)} | engine,
                "batches": [batch.to_json() for batch in batches],
                "break_with": ["kill_rank", RANK, STEPS_BEFORE],
                "out": str(out),
            }
        )
    )
    done = run_python([str(SCRIPT.with_name("generate_then_fail.py")), str(plan)], environment, limit)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    seen = json.loads(out.read_text())
    answers = [[Answer(one["id"], one["token_ids"]) for one in batch] for batch in seen["batches"]]
    return Killed(answers, *seen["error"])


def expect_the_rank(killed: Killed) -> None:
    """The error names the rank that was killed, and how, before all that followed from it."""
    assert killed.kind == "EngineDeadError"
    first = re.search("what failed first: (.*)", killed.text)
    assert first, killed.text
    pattern = rf"WorkerDied: the worker was killed by SIGKILL.* \(rank {RANK}, worker process \d+\)"
    assert re.fullmatch(pattern, first[1]), killed.text


def expect_whole_records(killed: Killed, batches: list[Batch], folder: Path) -> None:
    """Every request that had been answered has its record, and no record is torn."""
    with Store.open(folder) as store:
        assert list(store.verify()) == []
        for batch, answers in zip(batches, killed.answers, strict=True):
            for prompt, answer in zip(batch.prompts, answers, strict=True):
                record = store[answer.request_id]
                assert record.complete
                assert record.token_ids.tolist() == (prompt + answer.token_ids)[:-1]
