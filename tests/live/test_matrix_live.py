"""What is shown on every release: one engine without the overlay and one with it, the same script and the same prompts.

`tools/matrix.py` runs these tests in the environment of each release; a test here is a cell of the table in README.md.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from packaging.specifiers import SpecifierSet

from tests.live.runs import ENGINE, Answer, Batch, Reference, make_prompt, run_python
from tests.tiny_models import write_tiny_llama
from vllm_overlay.eagle3.acceptance import Acceptance, load_draft, measure_acceptance, pool
from vllm_overlay.eagle3.export import FORMATS, export_run
from vllm_overlay.eagle3.ranks import alone
from vllm_overlay.eagle3.settings import Settings
from vllm_overlay.eagle3.target import load_target
from vllm_overlay.eagle3.training import train
from vllm_overlay.fingerprint import fingerprint_model
from vllm_overlay.store import PendingRecord, Store, StoreMeta, StoreWriter

pytestmark = pytest.mark.live

SCRIPTS = Path(__file__).parent / "scripts"
VLLM = metadata.version(metadata.packages_distributions()["vllm"][0])
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


def overlay_environment(**settings: str | Path) -> dict[str, str]:
    """The overlay switched on; a release that it has not seen is tried if the matrix was told to."""
    policy = {name: os.environ[name] for name in ("VLLM_OVERLAY_POLICY",) if name in os.environ}
    return {"VLLM_OVERLAY": "1"} | policy | {f"VLLM_OVERLAY_{name.upper()}": str(it) for name, it in settings.items()}


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


# What vLLM's own code dies of where it cannot serve a draft on a CPU.
CANNOT_SPECULATE = {
    SpecifierSet("<0.20"): "AssertionError: spec decode is not supported.",
    # It asks the target for no features.
    SpecifierSet(">=0.20,<0.22"): "ValueError: too many values to unpack (expected 2)",
    SpecifierSet(">=0.23,<0.25"): (
        "TypeError: _sample_recovered_tokens_kernel_impl() got an unexpected keyword argument 'USE_FP64_GUMBEL'"
    ),
    SpecifierSet("==0.30.*"): "TypeError: Cannot inspect kernel parameters for function",
}
# 0.11.0 feeds layers 2, N//2 and N-3, whatever a draft asks for: these are three.
DRAFTED_LAYERS, FEATURES = 8, (2, 4, 5)
PROMPT_LENGTH, NEW_TOKENS = 8, 40


@dataclass(frozen=True)
class Exported:
    """A target, texts that it wrote, a draft of it by format, and what that foresees of the texts, counted in torch."""

    model: Path
    texts: torch.Tensor
    drafts: dict[str, Path]
    chain: Acceptance


def write_texts(reference: Reference, count: int) -> torch.Tensor:
    """Prompts of random tokens and what the target says next, `[count, tokens]`."""
    prompts = torch.tensor([make_prompt(300 + i, PROMPT_LENGTH) for i in range(count)])
    length = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS}
    texts: torch.Tensor = reference.model.generate(
        prompts, attention_mask=torch.ones_like(prompts), do_sample=False, eos_token_id=None, pad_token_id=0, **length
    )
    return texts


def store_states(folder: Path, model: Path, reference: Reference, texts: torch.Tensor) -> Path:
    layer_ids = (*FEATURES, DRAFTED_LAYERS)
    config = json.loads((model / "config.json").read_text())
    fingerprint = fingerprint_model(str(model), config)
    meta = StoreMeta(
        layer_ids, config["hidden_size"], "float32", DRAFTED_LAYERS, str(model), fingerprint, VLLM, "transformers"
    )
    with StoreWriter.open(folder, meta) as writer:
        for number, text in enumerate(texts):
            first = writer.append(reference.states(text)[:, list(layer_ids)].contiguous())
            rows = np.arange(first, first + len(text), dtype=np.int64)
            writer.commit([PendingRecord(f"r{number}", text.numpy(), rows, PROMPT_LENGTH, True, "length", None, None)])
    return folder


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    folder = tmp_path_factory.mktemp("exported")
    model = write_tiny_llama(folder / "model", layers=DRAFTED_LAYERS, spread=0.05)
    reference = Reference(model)
    texts = write_texts(reference, 24)
    store = store_states(folder / "store", model, reference, texts)
    settings = Settings(features=FEATURES, draft_vocab_size=96, steps=12, batch_tokens=512, learning_rate=2e-3)
    train([store], model, folder / "run", settings, ranks=alone("cpu"))
    drafts = {name: export_run(folder / "run", folder / name, checkpoint="last", format=name) for name in FORMATS}
    draft = load_draft(drafts["vllm"], load_target(model).embed_tokens)
    chain = pool(
        measure_acceptance(draft, reference.states(text)[:, list(FEATURES)], text, PROMPT_LENGTH, 3) for text in texts
    )
    return Exported(model, texts, drafts, chain)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, exported: Exported) -> dict[str, Any]:
    """What `scripts/serve_exported.py` found."""
    folder = tmp_path_factory.mktemp("served")
    plan, out = folder / "plan.json", folder / "out.json"
    content = {
        "engine": ENGINE | {"model": str(exported.model)},
        "drafts": {name: str(draft) for name, draft in exported.drafts.items()},
        "prompts": exported.texts[:, :PROMPT_LENGTH].tolist(),
        # The chain counts checks whose three tokens lie inside the text; vLLM's last check has its first token inside.
        "max_tokens": [NEW_TOKENS - 2] * len(exported.texts),
        "out": str(out),
    }
    plan.write_text(json.dumps(content))
    environment = overlay_environment() | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    done = run_python([str(SCRIPTS / "serve_exported.py"), str(plan)], environment)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def test_a_draft_of_ours_is_served(
    served: dict[str, Any], exported: Exported, record_property: Callable[[str, object], None]
) -> None:
    """In both formats: the target's own text, and the checks and accepted tokens that the chain in torch counts."""
    plain = served["alone"]["token_ids"]
    assert plain == exported.texts[:, PROMPT_LENGTH:-2].tolist()
    by_draft = [served[name] for name in FORMATS]
    known = next((error for releases, error in CANNOT_SPECULATE.items() if VLLM in releases), None)
    if known:
        assert [known in one.get("error", "") for one in by_draft] == [True] * len(FORMATS), by_draft
        pytest.skip(known)
    accepted = list(exported.chain.accepted_per_position)
    assert accepted[-1] > 0
    expected = {
        "token_ids": plain,
        "num_drafts": exported.chain.num_drafts,
        "num_draft_tokens": 3 * exported.chain.num_drafts,
        "accepted_per_position": accepted,
    }
    assert by_draft == [expected] * len(FORMATS)
    counts = f"{exported.chain.num_drafts} times 3 tokens proposed, accepted {', '.join(map(str, accepted))}"
    record_property("a draft of ours served, k=3", counts)
