"""Training while a store is written: each record once, killed and taken up exactly, and disk that stays bounded."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from tests.eagle3.conftest import HIDDEN, LAYER_IDS, LAYERS, VOCABULARY, forward, greedy
from tests.eagle3.test_training import same_run
from vllm_overlay.cli import main
from vllm_overlay.eagle3.follow import FOLLOWED, Follower, Following, stopping_at_signals
from vllm_overlay.eagle3.ranks import alone
from vllm_overlay.eagle3.run_folder import Progress, RunFolder
from vllm_overlay.eagle3.settings import Settings, learning_rate
from vllm_overlay.eagle3.training import follow, train
from vllm_overlay.errors import OverlayError
from vllm_overlay.store import PendingRecord, Store, StoreMeta, StoreWriter

SETTINGS = Settings(
    features=(0, 2, 3), draft_vocab_size=48, batch_tokens=64, checkpoint_every=2, learning_rate=2e-3, ttt_steps=2
)
LENGTH, ROW_BYTES, ROWS_PER_SHARD = 20, len(LAYER_IDS) * HIDDEN * 4, 50
SHARD = ROW_BYTES * ROWS_PER_SHARD

# Trains in a process of its own, which dies in the middle of step 6, after the checkpoint of step 4.
KILLED = """
import os, signal, sys
from vllm_overlay.eagle3 import follow, ranks, run_folder, settings, training
append = run_folder.RunFolder.append_metrics
def append_and_die(self, line):
    if line["step"] == 6:
        os.kill(os.getpid(), signal.SIGKILL)
    append(self, line)
run_folder.RunFolder.append_metrics = append_and_die
following = follow.Following(100, int(sys.argv[5]))
asked = eval("settings." + sys.argv[4])
training.follow(sys.argv[1], sys.argv[2], sys.argv[3], asked, following, ranks=ranks.alone("cpu"))
"""


class LiveStore:
    """A writer at work, who knows one text and tells it with another id each time."""

    def __init__(self, path: Path, reference: LlamaForCausalLM) -> None:
        self.path = path
        meta = StoreMeta(LAYER_IDS, HIDDEN, "float32", LAYERS, "tiny", "tiny", "0.0.0", "V1")
        self.writer = StoreWriter.open(path, meta, rows_per_shard=ROWS_PER_SHARD)
        generator = torch.Generator().manual_seed(3)
        self.texts = [
            greedy(reference, torch.randint(3, VOCABULARY, (8,), generator=generator), LENGTH) for _ in range(4)
        ]
        self.states = [forward(reference, text, LAYER_IDS).contiguous() for text in self.texts]
        self.count = 0

    def add(self, records: int = 1) -> None:
        for _ in range(records):
            which = self.count % len(self.texts)
            first = self.writer.append(self.states[which])
            rows = np.arange(first, first + LENGTH, dtype=np.int64)
            record = PendingRecord(f"r{self.count}", self.texts[which].numpy(), rows, 8, True, "length", None, None)
            self.writer.commit([record])
            self.count += 1

    def count_shards(self) -> int:
        return len(list((self.path / "shards").glob("*.safetensors")))


@pytest.fixture
def live(tmp_path: Path, reference: LlamaForCausalLM) -> Iterator[LiveStore]:
    store = LiveStore(tmp_path / "live", reference)
    yield store
    store.writer.close()


def test_each_record_once_in_the_order_of_arrival(live: LiveStore, model_folder: Path, tmp_path: Path) -> None:
    """From before the store has a record, by batches of three, and the last one as it is after a silence."""

    def write() -> None:
        for _ in range(16):
            time.sleep(0.05)
            live.add()

    writer = threading.Thread(target=write)
    writer.start()
    said: list[str] = []
    result = follow(
        live.path, model_folder, tmp_path / "run", SETTINGS, Following(100, idle_seconds=1.0), ranks=alone("cpu"),
        say=said.append,
    )  # fmt: skip
    writer.join()
    lines = RunFolder.open(tmp_path / "run").metrics
    assert [line["tokens"] for line in lines] == [60, 60, 60, 60, 60, 20]
    assert result.steps == 6 and result.tokens == 16 * LENGTH and result.held_out_accuracy is None
    assert any(line.startswith("self-test") for line in said)
    folder = RunFolder.open(tmp_path / "run")
    assert folder.pointer("last") == folder.pointer("best") == 6
    assert folder.config["data"]["digest"].startswith(FOLLOWED)


def write_at_its_pace(live: LiveStore, run: Path, records: int, most_shards: list[int]) -> None:
    """At most 12 records ahead of the last checkpoint, for three are a batch; and how many shards there were."""
    deadline = time.monotonic() + 60
    while live.count < records and time.monotonic() < deadline:
        most_shards.append(live.count_shards())
        done = 3 * RunFolder(run).pointer("last") if (run / "last").exists() else 0
        if live.count < done + 12:
            live.add()
        else:
            time.sleep(0.01)


def test_a_killed_run_goes_on_exactly_on_bounded_disk(
    live: LiveStore, reference: LlamaForCausalLM, model_folder: Path, tmp_path: Path
) -> None:
    """What came after its last checkpoint is still there, and what came before it goes."""
    records, keep = 60, 5  # of which two and a half are a shard
    whole = LiveStore(tmp_path / "kept", reference)
    whole.add(records)
    following = Following(100, idle_seconds=0.5)
    follow(whole.path, model_folder, tmp_path / "whole", SETTINGS, following, ranks=alone("cpu"))
    whole.writer.close()

    most_shards: list[int] = []
    run = tmp_path / "killed"
    writer = threading.Thread(target=write_at_its_pace, args=(live, run, records, most_shards))
    writer.start()
    arguments = [str(live.path), str(model_folder), str(run), repr(SETTINGS), str(keep * SHARD)]
    killed = subprocess.run([sys.executable, "-c", KILLED, *arguments], capture_output=True, text=True, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert RunFolder.open(run).pointer("last") == 4 and not (live.path / "shards" / "0001-00000.safetensors").exists()
    # The writer waits for a checkpoint, which must not be taken for a silence.
    bounded = replace(following, keep_bytes=keep * SHARD, idle_seconds=3.0)
    follow(live.path, model_folder, run, SETTINGS, bounded, ranks=alone("cpu"), resume=True)
    writer.join()
    same_run(tmp_path / "whole", run)
    # Those to keep, those of a checkpoint's two batches and of the 12 records ahead, and the one being written.
    assert max(most_shards) <= keep + 3 + 5 + 1 < records * LENGTH / ROWS_PER_SHARD / 1.5
    live.writer.close()
    assert live.count_shards() <= keep
    with Store.open(live.path) as store:
        assert list(store.verify()) == [] and len(store) == records
        assert store.complete_numbers()[-1] == records - 1


def test_records_that_come_too_fast_are_passed_over(live: LiveStore, tmp_path: Path) -> None:
    """The oldest, whose rows go with the next checkpoint, wherever training stands in its batch."""
    live.add(30)
    said: list[str] = []
    following = Following(100, keep_bytes=4 * SHARD, idle_seconds=0.0)
    follower = Follower(live.path, SETTINGS, following, resumes=True, stop=threading.Event(), say=said.append)
    first, second, third, last = follower.plan(Progress())
    assert [entry.index for batch in (first, second, third, last) for entry in batch.entries] == list(range(20, 30))
    assert [batch.records for batch in (first, second, third, last)] == [23, 26, 29, 30]
    assert said[-1] == "training is behind: 20 records passed over, 20 in all"
    assert live.count_shards() == 12
    follower.release(Progress(records=23))
    follower.close()
    assert live.count_shards() == 4


def test_sigterm_ends_a_run_with_a_checkpoint(live: LiveStore, model_folder: Path, tmp_path: Path) -> None:
    """The batch that is not full is left for the next time."""
    live.add(11)
    metrics = tmp_path / "run" / "metrics.jsonl"

    def signal_after_two_steps() -> None:
        deadline = time.monotonic() + 60
        while not (metrics.exists() and len(metrics.read_text().splitlines()) == 2) and time.monotonic() < deadline:
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=signal_after_two_steps)
    thread.start()
    said: list[str] = []
    arguments = live.path, model_folder, tmp_path / "run", SETTINGS
    follow(*arguments, Following(100, idle_seconds=60.0), ranks=alone("cpu"), say=said.append)
    thread.join()
    assert said[-1] == "SIGTERM: the run ends after this step, with a checkpoint"
    folder = RunFolder.open(tmp_path / "run")
    progress = (folder.find_checkpoint("last") / "state.json").read_text()
    assert folder.pointer("last") == 3 and '"records": 9' in progress
    follow(*arguments, Following(100, idle_seconds=0.1), ranks=alone("cpu"), resume=True)
    assert [line["tokens"] for line in folder.metrics] == [60, 60, 60, 40]


@pytest.fixture
def interruptible() -> Iterator[None]:
    """SIGINT raises, also in tests that a shell runs in the background, where it is ignored from the start."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_a_second_signal_does_what_it_did_before() -> None:
    said: list[str] = []
    with stopping_at_signals(said.append) as stop:
        assert not stop.is_set()
        signal.raise_signal(signal.SIGINT)
        assert stop.is_set() and said == ["SIGINT: the run ends after this step, with a checkpoint"]
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--keep-bytes", "1G"], "--keep-bytes goes with --follow"),
        (["--idle-seconds", "1"], "--idle-seconds goes with --follow"),
        (["--follow", "--idle-seconds", "0"], "nothing to learn from: there is no store, and the run was ended"),
        (["other", "--follow"], "--follow: one store, not 2"),
        (["--follow"], "is in a remote folder"),
    ],
)
def test_what_cannot_be_followed_is_refused(
    model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], said: str
) -> None:
    run = tmp_path / "run"
    store = "memory://s" if said == "is in a remote folder" else str(tmp_path / "s")
    assert main(["train", store, *options, "--model", str(model_folder), "-o", str(run)]) == 1
    assert said in capsys.readouterr().err and not run.exists()


def test_a_url_of_this_machines_files_is_one_of_its_folders(
    model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--follow", "--idle-seconds", "0", "--model", str(model_folder), "-o", str(tmp_path / "run")]
    assert main(["train", f"file://{tmp_path}/s", *words]) == 1
    assert f"{tmp_path}/s: nothing to learn from: there is no store" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["nan", "-1"])
def test_a_time_that_is_none_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["train", "s", "--follow", "--idle-seconds", text, "--model", "m", "-o", "run"])
    assert f"{text} is no number of seconds, 0 or more" in capsys.readouterr().err


def test_fewer_bytes_than_a_batch_takes_are_refused(live: LiveStore, model_folder: Path, tmp_path: Path) -> None:
    """As where the G of 64G was forgotten: all records would be passed over."""
    live.add(30)
    arguments = live.path, model_folder, tmp_path / "run", SETTINGS
    with pytest.raises(OverlayError, match=f"--keep-bytes 64: a batch takes {64 * ROW_BYTES} bytes"):
        follow(*arguments, Following(100, keep_bytes=64, idle_seconds=0.0), ranks=alone("cpu"))
    assert live.count_shards() == 12 and not (tmp_path / "run").exists()


def test_a_run_is_resumed_on_its_own_store_and_as_it_was_made(
    live: LiveStore, reference: LlamaForCausalLM, model_folder: Path, tmp_path: Path
) -> None:
    """Rows of another store would be removed that nobody has learnt from."""
    live.add(12)
    other, run, following = LiveStore(tmp_path / "other", reference), tmp_path / "run", Following(100, idle_seconds=0.0)
    other.add(30)
    follow(live.path, model_folder, run, SETTINGS, following, ranks=alone("cpu"))
    bounded = replace(following, keep_bytes=2 * SHARD)
    with pytest.raises(OverlayError, match=f"was made with data digest = {FOLLOWED}.*, not {FOLLOWED}"):
        follow(other.path, model_folder, run, SETTINGS, bounded, ranks=alone("cpu"), resume=True)
    assert other.count_shards() == 12
    other.writer.close()
    with pytest.raises(OverlayError, match="was made with --follow; resume it so"):
        train([live.path], model_folder, run, SETTINGS, ranks=alone("cpu"), resume=True)


def test_a_folder_of_replicas_is_refused(live: LiveStore, model_folder: Path, tmp_path: Path) -> None:
    """It was taken for one that has no store yet, and waited for."""
    (tmp_path / "all").mkdir()
    live.path.rename(tmp_path / "all" / "replica-0")
    with pytest.raises(OverlayError, match="holds several replicas' stores; follow one of them"):
        follow(tmp_path / "all", model_folder, tmp_path / "run", SETTINGS, Following(100, idle_seconds=0.0))
    (tmp_path / "all" / "replica-0").rename(live.path)


def test_the_learning_rate_of_a_run_without_an_end() -> None:
    settings = Settings(learning_rate=1.0, warmup=0.01)
    assert [learning_rate(step, settings) for step in (1, 5, 10, 11, 100_000)] == [0.1, 0.5, 1.0, 1.0, 1.0]
