"""The command line end to end on a tiny target: prepare, capture, train, export, evaluate; and what is taken up again.

The draft learns a random target's own text, so it accepts little: what is compared is how acceptance is counted.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.live.runs import Reference, clean_environment, run_python
from tests.tiny_models import write_tiny_llama
from vllm_overlay.dataset import Dataset, DatasetItem, write_dataset
from vllm_overlay.eagle3.acceptance import Acceptance, load_draft, measure_acceptance, pool
from vllm_overlay.eagle3.export import export_run
from vllm_overlay.eagle3.ranks import alone
from vllm_overlay.eagle3.settings import Settings
from vllm_overlay.eagle3.target import load_target
from vllm_overlay.eagle3.training import train
from vllm_overlay.offline.replica import share_out
from vllm_overlay.store import Record, Store, StoreError, summarize

pytestmark = pytest.mark.live

ENGINE = ["--", "--dtype", "float32", "--enforce-eager", "--max-model-len", "256"]
LAYERS = 8


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model"), layers=LAYERS, spread=0.05)


def run_command(*words: str | Path, ok: bool = True) -> subprocess.CompletedProcess[str]:
    environment = {"OMP_NUM_THREADS": "2", "VLLM_ALLOW_INSECURE_SERIALIZATION": "0"}
    done = run_python(["-m", "vllm_overlay.cli", *map(str, words)], environment)
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


@dataclass(frozen=True)
class Captured:
    """The store of the two replicas, and what was seen on the way."""

    store: Path
    shares: tuple[int, int]
    lost_with: int
    """records that the second replica had committed when it was killed"""
    printed: tuple[str, str]
    """by the first replica, and by the second, started again"""


def vary(item: DatasetItem, turn: int) -> DatasetItem:
    """The item under another key, with no prefix that another one has."""
    return DatasetItem(f"{item.key}.{turn}", np.roll(item.token_ids, turn), np.roll(item.loss_mask, turn))


def replica_variables(rank: int) -> dict[str, str]:
    """What torchrun sets; with the last, a process group of the engine's own would wait for torchrun's store."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": "2",
        "LOCAL_RANK": str(rank),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29400",
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


def count_records(store: Path) -> int:
    """Records that the second replica has committed."""
    for path in store.glob("replica-1-of-2-*"):
        # An index has no tables for a moment after its file is there.
        with contextlib.suppress(StoreError), Store.open(path) as opened:
            return len(opened)
    return 0


def kill_at_first_record(command: list[str], environment: dict[str, str], store: Path) -> int:
    """Start the second replica, and kill all its processes when there is a record; how many there are then."""
    with (store.parent / "killed.log").open("w") as log:
        process = subprocess.Popen(
            command, env=clean_environment(environment), stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            while not count_records(store):
                assert process.poll() is None, (store.parent / "killed.log").read_text()[-5000:]
                time.sleep(0.01)
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return count_records(store)


@pytest.fixture(scope="module")
def captured(tmp_path_factory: pytest.TempPathFactory, model: Path, dataset: Path) -> Captured:
    """All but three of the items and variations of them, by two replicas at the same time; the second is lost in the
    middle and started again."""
    path = tmp_path_factory.mktemp("capture") / "store"
    part = path.parent / "part"
    items = list(Dataset.open(dataset))[:57]
    varied = [vary(item, turn) for turn in range(1, 8) for item in items]
    write_dataset(part, [*items, *varied], {"model": str(model)})
    words = ["-m", "vllm_overlay.cli", "capture", str(part), "--model", str(model), "-o", str(path), *ENGINE]
    # One of the items a step: a replica is not through before it is killed.
    words += ["--max-num-seqs", "1", "--max-num-batched-tokens", "256"]
    environments = [{"OMP_NUM_THREADS": "1", **replica_variables(rank)} for rank in range(2)]
    with ThreadPoolExecutor() as pool:
        first = pool.submit(run_python, words, environments[0])
        lost_with = kill_at_first_record([sys.executable, *words], environments[1], path)
        second = run_python(words, environments[1])
        first_done = first.result()
    for done in (first_done, second):
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-5000:]
    plan = share_out([*items, *varied], 2)
    shares = (plan.owners.count(0), plan.owners.count(1))
    return Captured(path, shares, lost_with, (first_done.stdout, second.stdout))


@pytest.fixture(scope="module")
def store(captured: Captured) -> Path:
    return captured.store


def test_a_lost_replica_takes_up_what_is_missing_of_its_share(captured: Captured) -> None:
    """CASES 20 with two replicas, one of which is killed: every item once, whoever computed it and when."""
    first, second = captured.shares
    assert 0 < captured.lost_with < second
    assert (
        f"replica 0/2 (RANK=0 and WORLD_SIZE=2): {first} of 456 items, {first} of them missing" in captured.printed[0]
    )
    assert f"{first} captured, 0 already there" in captured.printed[0]
    assert f"{second - captured.lost_with} captured, {captured.lost_with} already there" in captured.printed[1]
    with Store.open(captured.store) as opened:
        tags = [record.tag for record in opened if record.complete]
        assert len(opened.members) == 2
        assert list(opened.verify()) == []
    assert len(tags) == len(set(tags)) == 456


def test_only_what_is_missing_is_captured(store: Path, dataset: Path, model: Path) -> None:
    """CASES 20 and 41: with 57 of 60 done, by others, run again alone: exactly 3 forward passes; again: 0. What the
    command asks of the workers is asked where vLLM may pickle nothing."""
    with Store.open(store) as opened:
        rows, records = summarize(opened).rows_stored, len(opened)
    items = {item.key: item for item in Dataset.open(dataset)}
    missing = [key for key in items if key not in {record.tag for record in Store.open(store)}]
    assert len(missing) == 3
    again = run_command("capture", dataset, "--model", model, "-o", store, *ENGINE)
    assert "3 captured, 57 already there" in again.stdout
    assert "replica 0/1 (" not in again.stdout, "one that is alone says nothing of replicas"
    reference = Reference(model)
    with Store.open(store) as opened:
        assert len(opened) == records + 3
        assert summarize(opened).rows_stored <= rows + sum(len(items[key].token_ids) for key in missing)
        for record in opened:
            if record.tag not in items:
                continue  # a variation
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


SERVE_DRAFTS = Path(__file__).parent / "scripts" / "serve_drafts.py"


@dataclass(frozen=True)
class Served:
    """What came, under the overlay, of `changed` (the draft with other layers in its config.json), of the draft with a
    stranger of the same sizes, and of one with Qwen3's layer; `texts` and `chain` are what the last must give."""

    changed: Path
    draft: Path
    stranger: Path
    result: dict[str, Any]
    texts: list[list[int]]
    chain: Acceptance


def find_own_text(record: Record) -> tuple[int, int]:
    """Where the target's own text begins and ends; the token that ends its turn may be the template's."""
    assert record.loss_mask is not None
    positions = record.loss_mask.nonzero()[:, 0].tolist()
    return positions[0], positions[-1]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, draft: Path, store: Path, dataset: Path, model: Path) -> Served:
    folder = tmp_path_factory.mktemp("served")
    changed = shutil.copytree(draft, folder / "changed")
    config = json.loads((draft / "config.json").read_text())
    (changed / "config.json").write_text(json.dumps(config | {"eagle_aux_hidden_state_layer_ids": [1, 4, 5]}))
    stranger = write_tiny_llama(folder / "stranger", layers=LAYERS, seed=1, spread=0.05)
    train([store], model, folder / "run", Settings(style="qwen3", steps=30, batch_tokens=512), ranks=alone("cpu"))
    qwen3 = export_run(folder / "run", folder / "qwen3", checkpoint="last")

    loaded = load_draft(qwen3, load_target(model).embed_tokens)
    with Store.open(store) as opened:
        keys = {item.key for item in Dataset.open(dataset)}
        records = [record for record in opened if record.tag in keys and int(record.loss_mask.sum()) > 20][:12]
        spans = [find_own_text(record) for record in records]
        chain = pool(
            measure_acceptance(loaded, record.hidden_states[:end, :3], record.token_ids[:end], begin, 3)
            for record, (begin, end) in zip(records, spans, strict=True)
        )
        tokens = [record.token_ids.tolist() for record in records]
    prompts = [ids[:begin] for ids, (begin, _) in zip(tokens, spans, strict=True)]
    # The chain counts checks whose three tokens lie inside the text; vLLM's last check has its first token inside.
    texts = [ids[begin : end - 2] for ids, (begin, end) in zip(tokens, spans, strict=True)]
    plan = {
        "refused": [[str(changed), str(model)], [str(draft), str(stranger)]],
        "draft": str(qwen3),
        "model": str(model),
        "prompts": prompts,
        "max_tokens": [len(text) for text in texts],
        "out": str(folder / "out.json"),
    }
    (folder / "plan.json").write_text(json.dumps(plan))
    done = run_python([str(SERVE_DRAFTS), str(folder / "plan.json")], {"VLLM_OVERLAY": "1", "OMP_NUM_THREADS": "2"})
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-5000:]
    return Served(changed, draft, stranger, json.loads((folder / "out.json").read_text()), texts, chain)


def test_a_draft_is_not_served_with_other_layers_or_another_target(served: Served, model: Path) -> None:
    by_layers, by_target = served.result["refusals"]
    trained_on = f"DraftMismatchError: draft {served.changed}: trained on layers 2, 4, 5 of {model}, and vLLM "
    assert by_layers.startswith(trained_on) and "would feed it layers 1, 4, 5;" in by_layers
    other = f"DraftMismatchError: draft {served.draft}: trained on another target than {served.stranger}, of the same"
    assert by_target.startswith(other)


def test_a_draft_with_the_layer_of_qwen3_is_served(served: Served) -> None:
    """The target's own text, and the same checks and the same tokens accepted as the chain in torch counts."""
    assert served.result["token_ids"] == served.texts
    assert served.chain.accepted_per_position[0] > 0
    assert served.result["num_drafts"] == served.chain.num_drafts
    assert served.result["accepted_per_position"] == list(served.chain.accepted_per_position)


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
