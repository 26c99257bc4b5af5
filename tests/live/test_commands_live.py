"""The command line end to end on a tiny target: prepare, capture, train, export, evaluate; and what is taken up again.

The draft learns a random target's own text, so it accepts little: what is compared is how acceptance is counted.
"""

from __future__ import annotations

import json
import random
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.live.runs import Reference, run_python
from tests.tiny_models import write_tiny_llama
from vllm_overlay.dataset import Dataset, DatasetItem, write_dataset
from vllm_overlay.store import Store, summarize

pytestmark = pytest.mark.live

ENGINE = ["--", "--dtype", "float32", "--enforce-eager", "--max-model-len", "256"]
LAYERS = 8


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model"), layers=LAYERS, spread=0.05)


def run_command(*words: str | Path, ok: bool = True) -> subprocess.CompletedProcess[str]:
    done = run_python(["-m", "vllm_overlay.cli", *map(str, words)], {"OMP_NUM_THREADS": "2"})
    assert (done.returncode == 0) == ok, done.stdout[-2000:] + done.stderr[-5000:]
    return done


def write_chats(file: Path, count: int, seed: int) -> Path:
    generator = random.Random(seed)
    words = ["sun", "moon", "tree", "river", "bird", "stone", "cloud", "wind"]
    lines = [
        json.dumps({"id": f"c{i}", "messages": [{"role": "user", "content": " ".join(generator.choices(words, k=4))}]})
        for i in range(count)
    ]
    file.write_text("\n".join(lines) + "\n")
    return file


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    folder = tmp_path_factory.mktemp("dataset")
    chats = write_chats(folder / "chats.jsonl", 60, seed=1)
    run_command(
        "prepare", chats, "--model", model, "-o", folder / "data", "--regenerate", "--max-tokens", "60", *ENGINE
    )
    return folder / "data"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory, model: Path, dataset: Path) -> Path:
    path = tmp_path_factory.mktemp("capture") / "store"
    part = path.parent / "part"
    items = list(Dataset.open(dataset))
    write_dataset(part, items[:57], {"model": str(model)})
    first = run_command("capture", part, "--model", model, "-o", path, *ENGINE)
    assert "57 captured, 0 already there" in first.stdout
    return path


def test_only_what_is_missing_is_captured(store: Path, dataset: Path, model: Path) -> None:
    """CASES 20: with 57 of 60 done, run again: exactly 3 forward passes; again: 0."""
    with Store.open(store) as opened:
        rows, records = summarize(opened).rows_stored, len(opened)
    items = {item.key: item for item in Dataset.open(dataset)}
    missing = [key for key in items if key not in {record.tag for record in Store.open(store)}]
    assert len(missing) == 3
    again = run_command("capture", dataset, "--model", model, "-o", store, *ENGINE)
    assert "3 captured, 57 already there" in again.stdout
    reference = Reference(model)
    with Store.open(store) as opened:
        assert len(opened) == records + 3
        assert summarize(opened).rows_stored <= rows + sum(len(items[key].token_ids) for key in missing)
        for record in opened:
            item: DatasetItem = items[record.tag]
            assert record.token_ids.tolist() == item.token_ids.tolist()
            assert record.loss_mask is not None
            assert record.loss_mask.tolist() == item.loss_mask.tolist()
        states = reference.states(record.token_ids)[:, list(opened.layer_ids)]
        assert float((record.hidden_states - states).abs().max()) < 1e-4
    third = run_command("capture", dataset, "--model", model, "-o", store, *ENGINE)
    assert "0 captured, 60 already there: 0 tokens" in third.stdout


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory, store: Path, model: Path) -> Path:
    folder = tmp_path_factory.mktemp("draft")
    run_command(
        "train", store, "--model", model, "-o", folder / "run", "--steps", "60", "--batch-tokens", "512", "--lr", "2e-3"
    )
    run_command("export", folder / "run", "-o", folder / "draft")
    return folder / "draft"


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory, draft: Path, model: Path) -> dict[str, Any]:
    prompts = write_chats(tmp_path_factory.mktemp("prompts") / "held_out.jsonl", 12, seed=2)
    done = run_command(
        "evaluate",
        draft,
        "--model",
        model,
        "--prompts",
        prompts,
        "--max-tokens",
        "40",
        "--ignore-eos",
        "--json",
        *ENGINE,
    )
    parsed: dict[str, Any] = json.loads(done.stdout)
    return parsed


def test_the_chain_counts_every_check(report: dict[str, Any]) -> None:
    chain = report["chain"]
    assert chain["num_draft_tokens"] == 3 * chain["num_drafts"]
    # Each check gives one token of the target's and what was accepted; the first token needs no check.
    generated = chain["num_drafts"] + sum(chain["accepted_per_position"])
    assert 12 * 39 <= generated <= 12 * (39 + 3)
    assert chain["acceptance_length"] == pytest.approx(1 + sum(chain["accepted_per_position"]) / chain["num_drafts"])


def test_vllms_counters_agree_with_the_chain(report: dict[str, Any]) -> None:
    """Where this vLLM speculates on a CPU: the same checks, the same tokens accepted, the target's own text."""
    if report["vllm"] is None:
        assert report["vllm_version"].startswith(("0.16.0", "0.24.0"))
        return
    assert report["texts_equal"] == 12
    for name in ("num_drafts", "num_draft_tokens", "accepted_per_position"):
        assert report["vllm"][name] == report["chain"][name]


def test_a_folder_that_cannot_be_written_is_refused_before_the_model_loads(
    dataset: Path, model: Path, tmp_path: Path
) -> None:
    """CASES 24: a folder that cannot be written; the engine never starts (its options here would be refused)."""
    (tmp_path / "file").write_text("")
    done = run_command(
        "capture", dataset, "--model", model, "-o", tmp_path / "file" / "store", "--", "--no-such-option", ok=False
    )
    assert "vllm-overlay: error: cannot write" in done.stderr
    assert str(tmp_path / "file") in done.stderr
