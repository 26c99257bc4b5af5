"""What is shown on every release: one engine without the overlay and one with it, the same script and the same prompts.

`tools/matrix.py` runs these tests in the environment of each release; a test here is a cell of the table in README.md.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.live.runs import ENGINE, Answer, Batch, Reference, make_prompt, overlay_environment, run_python
from tests.tiny_models import write_tiny_llama
from vllm_overlay.store import Store

pytestmark = pytest.mark.live

SCRIPTS = Path(__file__).parent / "scripts"
LAYERS = 4
TOLERANCE = 1e-4


PREFIX = make_prompt(0, 36)
TWICE = make_prompt(1, 64)
BATCHES = [
    # A shared prefix of more than one block: computed once, then from the cache, alone and in a batch.
    Batch([make_prompt(2, 40, PREFIX)], 2),
    Batch([make_prompt(10 + i, length, PREFIX) for i, length in enumerate((37, 41, 64, 70))], 3),
    # More prompts than run at a time, and together more tokens than a step takes: waiting, and prompts cut in pieces.
    Batch([make_prompt(20 + i, length) for i, length in enumerate((1, 2, 3, 5, 8, 13, 21, 34, 55, 89))], 3),
    Batch([TWICE], 1),
    Batch([TWICE], 24),
]
LIMITS = {"max_num_batched_tokens": 48, "max_num_seqs": 8, "block_size": 32, "enable_chunked_prefill": True}


@dataclass(frozen=True)
class Run:
    """What the user's script saw, and what it printed."""

    answers: list[list[Answer]]
    traces: dict[str, list[str]]
    error: list[str]
    log: str


def run_engine(folder: Path, model: Path, environment: dict[str, str]) -> Run:
    folder.mkdir()
    plan, out = folder / "plan.json", folder / "out.json"
    engine = ENGINE | LIMITS | {"model": str(model)}
    plan.write_text(json.dumps({"engine": engine, "batches": [batch.to_json() for batch in BATCHES], "out": str(out)}))
    done = run_python([str(SCRIPTS / "generate_then_fail.py"), str(plan)], environment)
    log = done.stdout + done.stderr
    assert done.returncode == 0, log[-8000:]
    seen = json.loads(out.read_text())
    answers = [[Answer(one["id"], one["token_ids"]) for one in batch] for batch in seen["batches"]]
    return Run(answers, seen["traces"], seen["error"], log)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model"), layers=LAYERS, spread=0.05)


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Run:
    return run_engine(tmp_path_factory.mktemp("stock") / "run", model, {})


@pytest.fixture(scope="module")
def store_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("store") / "store"


@pytest.fixture(scope="module")
def captured(tmp_path_factory: pytest.TempPathFactory, model: Path, store_folder: Path) -> Run:
    environment = overlay_environment(capture=store_folder, layers="all")
    return run_engine(tmp_path_factory.mktemp("captured") / "run", model, environment)


def test_stock_without_the_variable(stock: Run) -> None:
    assert stock.traces == {"front end": [], "worker": []}


def test_every_captured_state_is_the_reference(captured: Run, store_folder: Path, model: Path) -> None:
    """Ids 0..N of every prompt and generated token, of the requests before the step that failed."""
    for where, target in (("front end", "ParallelConfig.__post_init__"), ("worker", "Worker.load_model")):
        assert any(target in trace for trace in captured.traces[where]), "the search for traces must be able to fail"
    reference = Reference(model)
    requests = [
        (prompt, answer)
        for batch, answers in zip(BATCHES, captured.answers, strict=True)
        for prompt, answer in zip(batch.prompts, answers, strict=True)
    ]
    with Store.open(store_folder) as store:
        assert store.layer_ids == tuple(range(LAYERS + 1))
        assert len(store) == len(requests)
        for prompt, answer in requests:
            record = store[answer.request_id]
            assert record.complete
            assert record.num_prompt_tokens == len(prompt)
            assert record.token_ids.tolist() == (prompt + answer.token_ids)[:-1], f"request {answer.request_id}"
            difference = (record.hidden_states - reference.states(record.token_ids)).abs().max()
            assert float(difference) < TOLERANCE, f"request {answer.request_id} of {len(prompt)} tokens"


def test_text_is_unchanged_with_capture_on(stock: Run, captured: Run) -> None:
    generated = [[answer.token_ids for answer in batch] for batch in stock.answers]
    assert [len(tokens) for tokens in generated[-1]] == [24]
    assert [[answer.token_ids for answer in batch] for batch in captured.answers] == generated


def test_undo_puts_the_originals_back(tmp_path: Path) -> None:
    done = run_python([str(SCRIPTS / "undo.py")], overlay_environment(capture=tmp_path / "store"))
    assert done.returncode == 0, done.stderr[-4000:]
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert report["waiting"] == report["refused"] == []
    assert report["patched"]
    assert all(report["patched"].values()), report["patched"]
    assert report["left"] == []
    assert all(report["restored"].values()), report["restored"]
    assert report["traces"] == []


def test_error_text_is_no_less_than_stock(stock: Run, captured: Run) -> None:
    """CASES 21, a step that fails: what the caller gets and what is printed, with the overlay and without."""
    assert stock.error[0], "the step did not fail"
    assert captured.error[0] == stock.error[0]
    assert captured.error[1].startswith(stock.error[1])
    assert "ValueError: boom-17 (rank 0, " in captured.error[1]
    assert "ValueError: boom-17" in stock.log
    assert "ValueError: boom-17" in captured.log
