"""tools/compare_training.py: what is asked of the sides, and what is said of them. No side is trained here."""

from __future__ import annotations

import argparse
import importlib
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.contract.conftest import REPOSITORY


@pytest.fixture
def compare_training(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(REPOSITORY / "tools")
    return importlib.import_module("compare_training")


@pytest.fixture
def sides(compare_training: ModuleType) -> ModuleType:
    return importlib.import_module("training_sides")


def result(rate: float, losses: list[float], **more: Any) -> dict[str, Any]:
    """Of steps of 100 tokens; the first takes ten times as long as the others."""
    seconds = [1000 / rate] + [100 / rate] * (len(losses) - 1)
    return {"seconds": seconds, "tokens": [100] * len(losses), "losses": losses, "peak_memory_bytes": None, **more}


def test_sides_are_known_and_each_is_named_once(compare_training: ModuleType) -> None:
    assert compare_training.parse_sides("ours-flex,speculators") == ("ours-flex", "speculators")
    with pytest.raises(argparse.ArgumentTypeError, match="'theirs' is no side; there are ours, "):
        compare_training.parse_sides("ours,theirs")
    with pytest.raises(argparse.ArgumentTypeError, match="names a side twice"):
        compare_training.parse_sides("ours,ours")


def test_the_rate_is_that_of_the_steps_after_the_warm_up(compare_training: ModuleType) -> None:
    assert compare_training.summarise(result(50.0, [3.0, 2.0, 1.0]), 1)["tokens_per_second"] == pytest.approx(50)
    short = compare_training.summarise(result(50.0, [3.0]), 1)
    assert short["error"] == "only 1 steps were done in its time, and 1 are warm-up"
    assert "tokens_per_second" not in short


def test_losses_are_compared_after_the_steps_that_all_sides_did(compare_training: ModuleType) -> None:
    figures = {
        "ours": result(30.0, [3.0, 2.0, 1.0], tokens_per_second=30.0) | {"peak_memory_bytes": 3 << 30},
        "ours-flex": {"error": "exit status 1\nno GPU"},
        "speculators": result(20.0, [3.5, 2.5], tokens_per_second=20.0),
        "specforge": result(10.0, [0.0], tokens_per_second=10.0) | {"losses": None},
    }
    assert compare_training.describe(figures) == [
        "                  tokens/s  peak GiB      loss  after 2 steps",
        "ours                    30      3.00    2.0000",
        "ours-flex       failed: no GPU",
        "speculators             20         -    2.5000",
        "specforge               10         -   another",
        "ours is 1.50 x speculators",
        "ours is 3.00 x specforge",
    ]


def test_a_side_that_fails_gives_its_last_lines(
    compare_training: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    script = tmp_path / "side.py"
    script.write_text("import sys\nprint('bar 1\\rbar 2')\nprint('\\nno memory', file=sys.stderr)\nsys.exit(3)\n")
    monkeypatch.setattr(compare_training, "SIDES", script)
    found = compare_training.run_side("ours", tmp_path, 30)
    assert found["error"] in ("exit status 3\nno memory\nbar 2", "exit status 3\nbar 2\nno memory")


def test_a_side_that_hangs_is_ended(
    compare_training: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    script = tmp_path / "side.py"
    script.write_text("import time\nprint('compiling', flush=True)\ntime.sleep(60)\n")
    monkeypatch.setattr(compare_training, "SIDES", script)
    monkeypatch.setattr(compare_training, "GRACE_SECONDS", 0)
    assert compare_training.run_side("ours", tmp_path, 1.0)["error"] == "exit status stopped after 1 s\ncompiling"


def test_a_side_takes_no_step_after_its_time(sides: ModuleType) -> None:
    clock = sides.StepClock(torch.device("cpu"), 1, limit=1000.0)
    for _ in range(3):
        clock.tick()
    assert len(clock.figures()["seconds"]) == 2
    clock.limit = -1.0
    with pytest.raises(sides.Enough):
        clock.tick()
    assert len(clock.figures()["seconds"]) == 3  # the step that was under way counts


def test_speculators_is_asked_for_what_ours_does(sides: ModuleType, tmp_path: Path) -> None:
    work = sides.Work("target", "store", 1024, 5, 2, 1e-4, 256, 4)
    flags = sides.speculators_flags(work, tmp_path, 24, on_gpu=True)
    asked = dict(zip(flags[:-1:2], flags[1:-1:2], strict=True))
    ours = work.settings("flex", True)
    assert (asked["--ttt-steps"], asked["--ttt-step-loss-decay"]) == (str(ours.ttt_steps), str(ours.step_weight))
    assert (asked["--lr"], asked["--weight-decay"]) == (str(ours.learning_rate), str(ours.weight_decay))
    assert (asked["--total-seq-len"], asked["--draft-vocab-size"]) == ("1024", "256")
    assert int(24 * float(asked["--train-data-ratio"])) == 23  # as speculators splits: one record is for validation
    assert "--draft-attn-impl" not in flags  # its own choices, on a GPU
    assert "eager" in sides.speculators_flags(work, tmp_path, 24, on_gpu=False)


def test_the_file_names_no_folder_of_the_machine(
    compare_training: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    output = tmp_path / "figures.json"
    monkeypatch.setattr(compare_training, "prepare", lambda *args, **options: None)
    flags = {"settings": {"flags": ["--data-path", str(tmp_path / "data")]}, "error": "none"}
    monkeypatch.setattr(compare_training, "run_side", lambda *args: flags)
    args = argparse.Namespace(
        model=Path("/m/target"), store=Path("/s/store"), batch_tokens=8, steps=2, warm_up=1, lr=1e-4,
        draft_vocab_size=4, workers=1, sides=("ours",), side_seconds=1.0, output=output,
    )  # fmt: skip
    compare_training.compare(args, tmp_path)
    written = json.loads(output.read_text())
    assert (written["work"]["model"], written["work"]["store"]) == ("MODEL", "STORE")
    assert written["sides"]["ours"]["settings"]["flags"] == ["--data-path", "WORK/data"]
