"""Runs: the loss falls, a killed run goes on as if nothing had happened, and what does not fit is refused."""

from __future__ import annotations

import importlib
import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from vllm_overlay.eagle3 import clock
from vllm_overlay.eagle3.data import is_held_out, open_corpus, plan_epoch
from vllm_overlay.eagle3.ranks import alone
from vllm_overlay.eagle3.run_folder import RunFolder
from vllm_overlay.eagle3.selftest import measure_agreement
from vllm_overlay.eagle3.settings import Settings, learning_rate
from vllm_overlay.eagle3.target import load_target
from vllm_overlay.eagle3.trainer import Share, Taken, Trainer
from vllm_overlay.eagle3.training import _require_same_run, train
from vllm_overlay.errors import OverlayError
from vllm_overlay.store import Store

SETTINGS = Settings(
    features=(0, 2, 3),
    draft_vocab_size=48,
    steps=10,
    batch_tokens=64,
    holdout=0.2,
    checkpoint_every=2,
    learning_rate=2e-3,
)

# Trains in a process of its own and kills itself in step 7, after its line of metrics is half written.
KILLED = """
import os, signal, sys
from vllm_overlay.eagle3 import ranks, run_folder, training
append = run_folder.RunFolder.append_metrics
def append_and_die(self, line):
    if line["kind"] == "train" and line["step"] == 7:
        with (self.path / "metrics.jsonl").open("a") as file:
            file.write('{"kind": "train", "st')
        (self.path / "checkpoints" / ".writing-x").mkdir()
        os.kill(os.getpid(), signal.SIGKILL)
    append(self, line)
run_folder.RunFolder.append_metrics = append_and_die
training.train([sys.argv[1]], sys.argv[2], sys.argv[3], eval("training." + sys.argv[4]), ranks=ranks.alone("cpu"))
"""


def same_run(one: Path, other: Path) -> None:
    """Bit for bit: weights and optimiser of every kept checkpoint, and the metrics except for the clock."""
    first, second = RunFolder.open(one), RunFolder.open(other)
    assert first.steps() == second.steps() and first.pointer("best") == second.pointer("best")
    for step in first.steps():
        for file in ("draft.safetensors", "optimizer.safetensors"):
            left, right = (load_file(str(f.checkpoint(step) / file)) for f in (first, second))
            assert left.keys() == right.keys()
            assert all(torch.equal(left[name], right[name]) for name in left)
    drop_clock = [[{k: v for k, v in line.items() if k != "seconds"} for line in f.metrics] for f in (first, second)]
    assert drop_clock[0] == drop_clock[1]


def test_a_killed_run_resumes_bit_for_bit(store_path: Path, model_folder: Path, tmp_path: Path) -> None:
    """CASES 30: 5 steps, SIGKILL, 5 steps; in the middle of an epoch, and the sixth step is taken twice."""
    settings = replace(SETTINGS, checkpoint_every=5)
    train([store_path], model_folder, tmp_path / "whole", settings, ranks=alone("cpu"))
    arguments = [str(store_path), str(model_folder), str(tmp_path / "killed"), repr(settings)]
    killed = subprocess.run([sys.executable, "-c", KILLED, *arguments], capture_output=True, text=True, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    folder = RunFolder.open(tmp_path / "killed")
    assert folder.pointer("last") == 5
    assert json.loads((folder.checkpoint(5) / "state.json").read_text())["batch"] > 0
    assert '"step": 6' in (tmp_path / "killed" / "metrics.jsonl").read_text()

    result = train([store_path], model_folder, tmp_path / "killed", settings, ranks=alone("cpu"), resume=True)
    assert result.steps == 10
    same_run(tmp_path / "whole", tmp_path / "killed")
    steps = [line["step"] for line in folder.metrics if line["kind"] == "train"]
    assert steps == list(range(1, 11))
    assert not list((tmp_path / "killed" / "checkpoints").glob(".writing-*"))


def test_a_steps_time_is_its_own_at_a_checkpoint_too(
    store_path: Path, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The figures of two steps are read at once there, and before the first checkpoint one step late."""
    take_step: Callable[..., Taken] = Trainer.take_step

    now = 0.0

    def take_a_second(self: Trainer, step: int, share: Share) -> Taken:
        nonlocal now
        now += 1
        return take_step(self, step, share)

    monkeypatch.setattr(Trainer, "take_step", take_a_second)
    monkeypatch.setattr(clock, "time", SimpleNamespace(perf_counter=lambda: now))
    settings = replace(SETTINGS, steps=4)
    train([store_path], model_folder, tmp_path / "run", settings, ranks=alone("cpu"))
    lines = [line for line in RunFolder.open(tmp_path / "run").metrics if line["kind"] == "train"]
    assert [line["seconds"] for line in lines] == [1.0] * 4


def test_resuming_a_finished_run_changes_nothing(store_path: Path, model_folder: Path, tmp_path: Path) -> None:
    settings = replace(SETTINGS, steps=4)
    train([store_path], model_folder, tmp_path / "run", settings, ranks=alone("cpu"))
    before = (tmp_path / "run" / "metrics.jsonl").read_text()
    train([store_path], model_folder, tmp_path / "run", settings, ranks=alone("cpu"), resume=True)
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == before


@pytest.mark.parametrize("init", ["target", "random"])
def test_the_loss_falls(store_path: Path, model_folder: Path, tmp_path: Path, init: str) -> None:
    settings = replace(SETTINGS, init=init, steps=60, checkpoint_every=30, learning_rate=5e-3)
    train([store_path], model_folder, tmp_path / "run", settings, ranks=alone("cpu"))
    lines = [line for line in RunFolder.open(tmp_path / "run").metrics if line["kind"] == "train"]
    first, last = (np.mean([line["loss"] for line in part]) for part in (lines[:5], lines[-5:]))
    assert last < 0.9 * first
    assert np.mean([line["accuracy"][0] for line in lines[-5:]]) > np.mean([line["accuracy"][0] for line in lines[:5]])


def test_the_folder_of_a_run(store_path: Path, model_folder: Path, tmp_path: Path) -> None:
    train([store_path], model_folder, tmp_path / "run", replace(SETTINGS, steps=8), ranks=alone("cpu"))
    folder = RunFolder.open(tmp_path / "run")
    assert {p.name for p in folder.path.iterdir()} == {
        "config.json", "vocabulary.safetensors", "metrics.jsonl", "curve.png", "checkpoints", "last", "best",
    }  # fmt: skip
    assert folder.steps() == sorted({0, folder.pointer("best"), 6, 8})
    assert folder.config["data"]["model_fingerprint"] == "tiny"
    assert folder.config["draft"]["layer_ids"] == [0, 2, 3]
    validations = {line["step"]: line["loss"] for line in folder.metrics if line["kind"] == "validation"}
    assert sorted(validations) == [0, 2, 4, 6, 8]
    assert folder.pointer("best") == min(validations, key=lambda step: validations[step])
    assert (folder.path / "curve.png").read_bytes()[:4] == b"\x89PNG"


def test_a_narrow_draft_trains(store_path: Path, model_folder: Path, tmp_path: Path) -> None:
    """CASES 31: hidden 16 for a target of 32."""
    settings = replace(SETTINGS, hidden_size=16, steps=40, checkpoint_every=20, learning_rate=1e-2)
    train([store_path], model_folder, tmp_path / "run", settings, ranks=alone("cpu"))
    folder = RunFolder.open(tmp_path / "run")
    tensors = load_file(str(folder.find_checkpoint("last") / "draft.safetensors"))
    assert tensors["fc.weight"].shape == (16, 96)
    assert tensors["embed_tokens.weight"].shape == (128, 16)
    losses = [line["loss"] for line in folder.metrics if line["kind"] == "train"]
    assert np.mean(losses[-5:]) < np.mean(losses[:5]) - 0.5  # nats; the targets' own entropy is the floor


def test_a_run_is_not_overwritten(store_path: Path, model_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "x").touch()
    with pytest.raises(OverlayError, match="is not empty; continue that run with --resume"):
        train([store_path], model_folder, tmp_path / "run", SETTINGS, ranks=alone("cpu"))
    with pytest.raises(OverlayError, match="no training run here"):
        train([store_path], model_folder, tmp_path / "run", SETTINGS, ranks=alone("cpu"), resume=True)


def test_resuming_with_something_else_is_refused(
    make_store: Callable[..., Path], store_path: Path, model_folder: Path, tmp_path: Path
) -> None:
    train([store_path], model_folder, tmp_path / "run", replace(SETTINGS, steps=2), ranks=alone("cpu"))
    for change, reason in (
        ({"learning_rate": 1.0}, "settings learning_rate = 0.002, not 1.0"),
        ({"steps": 3}, "settings steps = 2, not 3"),
        ({"features": (0, 2, 6)}, r"settings features = \[0, 2, 3\], not \[0, 2, 6\]"),
    ):
        settings = replace(SETTINGS, **{"steps": 2, **change})
        with pytest.raises(OverlayError, match=reason):
            train([store_path], model_folder, tmp_path / "run", settings, ranks=alone("cpu"), resume=True)
    other = make_store(tmp_path / "other", records=11)
    with pytest.raises(OverlayError, match="data digest"):
        train([other], model_folder, tmp_path / "run", replace(SETTINGS, steps=2), ranks=alone("cpu"), resume=True)


def test_resuming_on_the_same_records_in_float8_is_refused(
    store_path: Path, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "tools")
    importlib.import_module("pack_store").pack_store(Store.open(store_path), tmp_path / "packed")
    settings = replace(SETTINGS, steps=2)
    train([store_path], model_folder, tmp_path / "run", settings, ranks=alone("cpu"))
    with pytest.raises(OverlayError, match=r"data dtypes = \['float32'\], not \['float8_e4m3"):
        train([tmp_path / "packed"], model_folder, tmp_path / "run", settings, ranks=alone("cpu"), resume=True)


@pytest.mark.parametrize(
    ("dropped", "added", "message"),
    [
        (["norm_output", "train_head"], {}, "it does not know norm_output, train_head"),
        ([], {"tree": 4}, "this release does not know tree"),
        (["train_head"], {"tree": 4}, "it does not know train_head; this release does not know tree"),
    ],
)
def test_a_run_of_another_release_is_refused_as_such(
    tmp_path: Path, dropped: list[str], added: dict[str, int], message: str
) -> None:
    settings = asdict(SETTINGS)
    facts = {"settings": settings, "data": {}}
    theirs = {name: value for name, value in settings.items() if name not in dropped} | added
    (tmp_path / "config.json").write_text(json.dumps({"settings": theirs, "data": {}}))
    with pytest.raises(OverlayError) as raised:
        _require_same_run(RunFolder(tmp_path), facts)
    assert str(raised.value) == (
        f"{tmp_path}: was made by another release of vllm-overlay ({message}); resume with that release, "
        "or start another run"
    )


def test_a_failed_start_leaves_no_folder(
    store_path: Path, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object) -> None:
        raise RuntimeError("boom")

    monkeypatch.setattr(RunFolder, "save_checkpoint", fail)
    with pytest.raises(RuntimeError, match="boom"):
        train([store_path], model_folder, tmp_path / "run", SETTINGS, ranks=alone("cpu"))
    assert list(tmp_path.iterdir()) == []


def test_layers_are_found_by_id(store_path: Path, states_of: Callable[..., torch.Tensor]) -> None:
    corpus = open_corpus([store_path], (0, 2, 3))
    document = corpus.document(corpus.entries[3])
    expected = states_of(document.token_ids, (0, 2, 3, 6))
    torch.testing.assert_close(document.features, expected[:, :3])
    torch.testing.assert_close(document.final_states, expected[:, 3])
    assert document.loss_mask.tolist() == [False] * 8 + [True] * (len(document.token_ids) - 8)


def test_a_missing_layer_is_named(store_path: Path) -> None:
    with pytest.raises(OverlayError, match=r"has layers \[6, 2, 0, 3\], not \[4\]"):
        open_corpus([store_path], (2, 3, 4))
    with pytest.raises(OverlayError, match="three layer ids"):
        open_corpus([store_path], (2, 3))
    assert open_corpus([store_path]).feature_ids == (2, 3, 3)


def test_stores_of_different_models_are_refused(
    make_store: Callable[..., Path], store_path: Path, tmp_path: Path
) -> None:
    with pytest.raises(OverlayError, match=r"model_fingerprint is 'other', in .* 'tiny'"):
        open_corpus([store_path, make_store(tmp_path / "a", records=1, fingerprint="other")])
    with pytest.raises(OverlayError, match=r"holds layers \[0, 2, 3, 6\]"):
        open_corpus([store_path, make_store(tmp_path / "b", records=1, layer_ids=(0, 2, 3, 6))])
    twice = open_corpus([store_path, make_store(tmp_path / "c", records=2)])
    assert len(twice.entries) == 14


def test_incomplete_and_cut_records_are_counted(make_store: Callable[..., Path], tmp_path: Path) -> None:
    corpus = open_corpus([make_store(tmp_path / "s", records=4, incomplete=1)], max_length=21)
    assert (corpus.skipped.incomplete, corpus.skipped.truncated) == (1, 2)
    assert [entry.num_tokens for entry in corpus.entries] == [21, 21, 21]


def test_an_all_zero_mask_is_an_error(make_store: Callable[..., Path], tmp_path: Path) -> None:
    """CASES 27: never all zero, whoever wrote the mask."""
    with pytest.raises(
        OverlayError, match=r"nothing to learn from: 0 incomplete.* 2 without a token under the loss mask"
    ):
        open_corpus([make_store(tmp_path / "s", records=2, loss_mask=np.zeros(1, dtype=bool))])


def test_batches_are_full_shuffled_and_complete(store_path: Path) -> None:
    entries = open_corpus([store_path]).entries
    epochs = [plan_epoch(entries, 64, seed=3, epoch=epoch) for epoch in (0, 1, 0)]
    assert epochs[0] == epochs[2] != epochs[1]
    for batches in epochs:
        assert sorted(entry.index for batch in batches for entry in batch) == list(range(12))
        sizes = [sum(entry.num_tokens for entry in batch) for batch in batches]
        assert max(sizes) <= 64 and min(sizes[:-1]) > 64 - 24
    assert [len(batch) for batch in plan_epoch(entries, 5, 0, 0)] == [1] * 12


def test_the_holdout_depends_on_the_name_alone() -> None:
    held = [key for key in map(str, range(2000)) if is_held_out(key, 0.1)]
    assert 150 < len(held) < 250
    assert set(held) <= {key for key in map(str, range(2000)) if is_held_out(key, 0.2)}
    assert not is_held_out("x", 0.0)


def test_the_self_test_sees_shifted_rows(
    make_store: Callable[..., Path], store_path: Path, model_folder: Path, tmp_path: Path
) -> None:
    target = load_target(model_folder)
    agreement = measure_agreement(open_corpus([store_path]), target, torch.device("cpu"))
    # 12 records of 20..24 tokens, 8 of them prompt: the state of the last prompt token says the first generated one.
    assert agreement.positions == sum(20 + n % 5 - 8 for n in range(12)) == agreement.agreed
    assert not agreement.is_suspicious

    shifted = make_store(tmp_path / "shifted", shift=1)
    assert measure_agreement(open_corpus([shifted]), target, torch.device("cpu")).is_suspicious
    said: list[str] = []
    arguments: dict[str, Any] = {"ranks": alone("cpu"), "say": said.append}
    train([shifted], model_folder, tmp_path / "run", replace(SETTINGS, steps=1), self_test="warn", **arguments)
    cause = "the rows are shifted: each holds the state of the token before it (read so, 100.0% agree)"
    assert f"WARNING: {cause}" in said and any(line.endswith("%, 99% expected)") for line in said)
    with pytest.raises(OverlayError, match=f"self-test: .*; {re.escape(cause)}"):
        train([shifted], model_folder, tmp_path / "strict", replace(SETTINGS, steps=1), **arguments)
    assert not (tmp_path / "strict").exists()


def test_another_vocabulary_is_refused_on_resume(
    store_path: Path, model_folder: Path, edit_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """A token that becomes special is kept; the data, and so their digest, are the same."""
    settings = replace(SETTINGS, steps=2, draft_vocab_size=16)
    train([store_path], model_folder, tmp_path / "run", settings, ranks=alone("cpu"))
    kept = load_file(str(tmp_path / "run" / "vocabulary.safetensors"))["t2d"]
    entries = open_corpus([store_path]).entries
    left_out = next(token for entry in entries for token in entry.token_ids.tolist() if not kept[token])
    other = edit_checkpoint(lambda config: config.update(eos_token_id=[2, left_out]))
    with pytest.raises(OverlayError, match="another draft vocabulary; have the model's special tokens changed"):
        train([store_path], other, tmp_path / "run", settings, ranks=alone("cpu"), resume=True)


def test_the_learning_rate_warms_up_and_falls() -> None:
    settings = Settings(steps=100, learning_rate=1.0, warmup=0.1)
    rates = [learning_rate(step, settings) for step in range(1, 101)]
    assert rates[:10] == pytest.approx([0.1 * n for n in range(1, 11)])
    assert rates[9:] == sorted(rates[9:], reverse=True) and 0 < rates[-1] < 0.001


ASKS_FOR_THREADS = """
import torch
from concurrent.futures import ThreadPoolExecutor
from vllm_overlay.eagle3.trainer import load_ahead, working_alone

torch.set_num_threads(3)
with working_alone() as pool:
    alone = pool.submit(torch.get_num_threads).result()
with ThreadPoolExecutor(1) as pool:
    later = pool.submit(torch.get_num_threads).result()
on_a_cpu = []
list(load_ahead([1], lambda item: on_a_cpu.append(torch.get_num_threads()), torch.device("cpu")))
print(alone, torch.get_num_threads(), later, *on_a_cpu)
"""


def test_who_works_alone_takes_no_threads_from_others() -> None:
    """The caller, and a thread that begins later, have what they had. In a process of its own, as it is told to all."""
    done = subprocess.run([sys.executable, "-c", ASKS_FOR_THREADS], capture_output=True, text=True, check=False)
    assert (done.stdout.split(), done.stderr) == (["1", "3", "3", "3"], "")
