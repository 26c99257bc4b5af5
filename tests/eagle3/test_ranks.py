"""Training by two ranks over gloo: the curve of one rank, resumed on the same number and on another, and failures."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.eagle3.rank_programs import Job, do
from vllm_overlay.eagle3.data import Entry, count_scored, deal
from vllm_overlay.eagle3.ranks import alone, join_ranks
from vllm_overlay.eagle3.run_folder import RunFolder
from vllm_overlay.eagle3.settings import Settings
from vllm_overlay.errors import OverlayError

PROGRAM = Path(__file__).with_name("rank_programs.py")
SETTINGS = Settings(
    features=(0, 2, 3), draft_vocab_size=48, steps=10, batch_tokens=64, holdout=0.2, checkpoint_every=4,
    learning_rate=2e-3,
)  # fmt: skip
# Adam divides by the size of the gradient, so that the last bits of the sums grow; 1e-6 was seen after ten steps.
TOLERANCE = 1e-5


def torchrun(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, env=environment)


@dataclass(frozen=True)
class Group:
    """What two ranks left: a folder of runs, and what the command said that failed after them."""

    runs: Path
    status: int
    stderr: str


@pytest.fixture(scope="module")
def group(store_path: Path, model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Group:
    folder = tmp_path_factory.mktemp("ranks")

    def job(name: str, settings: Settings = SETTINGS, resume: bool = False, stop_after: int | None = None) -> Job:
        return Job(str(store_path), str(model_folder), str(folder / name), asdict(settings), resume, stop_after)

    single = replace(SETTINGS, batch_tokens=24)  # one record fills a batch
    for before in (job("one"), job("one, then two", stop_after=6), job("one, single records", single)):
        do(before, alone("cpu"))
    together = [
        job("two"),
        job("two, again", stop_after=6),
        job("two, again", resume=True),
        job("one, then two", resume=True),
        job("two, then one", stop_after=6),
        job("two, single records", single),
    ]
    done = torchrun(
        str(PROGRAM), json.dumps([asdict(job) for job in together]), str(store_path), "--model", str(model_folder),
        "-o", str(folder / "failed" / "run"), "--features", "0,2,3", "--batch-tokens", "64", "--steps", "50",
        "--device", "cpu",
    )  # fmt: skip
    # Said once, not by each rank; the last self-test is of the command that fails.
    assert "resuming" in done.stdout and done.stdout.count("self-test") == len(together) + 1, done.stderr
    do(job("two, then one", resume=True), alone("cpu"))
    return Group(folder, done.returncode, done.stderr)


@pytest.fixture(scope="module")
def runs(group: Group) -> Path:
    return group.runs


def curve(run: Path, kind: str = "train") -> torch.Tensor:
    """[lines, figures]"""
    lines = [line for line in RunFolder.open(run).metrics if line["kind"] == kind]
    rows = [[line["loss"], *line["loss_per_step"], *line["kl_per_step"], *line["accuracy"]] for line in lines]
    return torch.tensor(rows, dtype=torch.float64)


def gradient_norms(run: Path) -> torch.Tensor:
    lines = [line for line in RunFolder.open(run).metrics if line["kind"] == "train"]
    return torch.tensor([line["gradient_norm"] for line in lines], dtype=torch.float64)


@pytest.mark.parametrize("run", ["two", "one, then two", "two, then one"])
def test_the_curve_is_that_of_one_rank(runs: Path, run: str) -> None:
    """Mean over the valid tokens of the global batch, not of the ranks' means: records are of 20 to 24 tokens."""
    for kind, lines in (("train", 10), ("validation", 4)):
        assert len(curve(runs / run, kind)) == lines
        assert (curve(runs / run, kind) - curve(runs / "one", kind)).abs().max() < TOLERANCE
    torch.testing.assert_close(gradient_norms(runs / run), gradient_norms(runs / "one"), rtol=1e-4, atol=0)
    steps = [line["step"] for line in RunFolder.open(runs / run).metrics if line["kind"] == "train"]
    assert steps == list(range(1, 11))


def test_a_broken_run_of_two_ranks_goes_on_bit_for_bit(runs: Path) -> None:
    one, other = RunFolder.open(runs / "two"), RunFolder.open(runs / "two, again")
    assert torch.equal(curve(one.path), curve(other.path))
    for file in ("draft.safetensors", "optimizer.safetensors"):
        left, right = (load_file(str(f.find_checkpoint("last") / file)) for f in (one, other))
        assert left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def test_checkpoints_are_whole(runs: Path) -> None:
    """The same names and shapes as one rank's, so that export and other numbers of ranks read them."""
    for file in ("draft.safetensors", "optimizer.safetensors"):
        one, two = (
            load_file(str(RunFolder.open(runs / name).find_checkpoint("last") / file)) for name in ("one", "two")
        )
        assert {name: tensor.shape for name, tensor in one.items()} == {name: t.shape for name, t in two.items()}
    assert (RunFolder.open(runs / "two").config["made_with"])["ranks"] == 2


def test_a_rank_without_a_record_counts_nothing_and_waits_for_nobody(runs: Path) -> None:
    """Every batch is a single record, so that rank 1 never has one of its own."""
    difference = curve(runs / "two, single records") - curve(runs / "one, single records")
    assert len(difference) == 10 and difference.abs().max() < TOLERANCE


def test_an_error_of_one_rank_ends_all_with_its_message(group: Group) -> None:
    assert group.status == 1
    said, summary = group.stderr.split("Root Cause")
    assert "vllm-overlay: error: rank 1 of 2: the fifth batch cannot be read\n" in said
    assert said.count("vllm-overlay: error:") == 1 and "closed by peer" not in said
    assert "OverlayError: the fifth batch cannot be read" in summary
    assert [path.name for path in (group.runs / "failed").iterdir()] == ["run"]


GROUP = {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"WORLD_SIZE": "abc"}, "WORLD_SIZE=abc in the environment is no number of 1 or more"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE=0 in the environment is no number of 1 or more"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE=2, and RANK is not set"),
        ({**GROUP, "RANK": "2"}, "RANK=2 in the environment is no number from 0 to 1"),
        ({**GROUP, "MASTER_PORT": "1x"}, "MASTER_PORT=1x in the environment is no number from 1 to 65535"),
        ({**GROUP, "LOCAL_RANK": "-1"}, "LOCAL_RANK=-1 in the environment is no number of 0 or more"),
        ({**GROUP, "MASTER_ADDR": ""}, "WORLD_SIZE=2, and MASTER_ADDR is not set"),
    ],
)
def test_variables_by_which_no_rank_is_found_are_one_line(
    environ: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in GROUP:
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(OverlayError) as raised, join_ranks("cpu"):
        pass
    assert str(raised.value) == f"{message}: start with torchrun, or unset WORLD_SIZE"


def entries(lengths: Sequence[int]) -> list[Entry]:
    return [
        Entry(0, n, str(n), torch.zeros(length).long(), torch.arange(length) >= 2, 2, 0)
        for n, length in enumerate(lengths)
    ]


def test_records_are_dealt_evenly() -> None:
    hands = deal(entries([5, 30, 10, 25, 12]), 2)
    assert [[entry.num_tokens for entry in hand] for hand in hands] == [[30, 10], [25, 12, 5]]
    assert deal(entries([7]), 3)[1:] == [[], []]


def test_rows_are_counted_without_reading_states() -> None:
    """Masked from token 2: 3 and 8 rows predict one at step 0; rows before the first one do not exist."""
    assert count_scored(entries([5, 10]), 3) == [11, 11, 9]
