"""TensorBoard, which is optional: what it is told, and a run that asks for it where it is missing."""

from __future__ import annotations

import importlib.util
import sys
import types
from pathlib import Path

import pytest

from vllm_overlay.eagle3.ranks import alone
from vllm_overlay.eagle3.run_folder import RunFolder
from vllm_overlay.eagle3.settings import Settings
from vllm_overlay.eagle3.training import train
from vllm_overlay.errors import OverlayError

SETTINGS = Settings(features=(0, 2, 3), draft_vocab_size=48, steps=3, batch_tokens=64, holdout=0.2, checkpoint_every=3)


def test_it_is_missing(store_path: Path, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Said before any work."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(OverlayError, match="--tensorboard: the package is not installed: pip install tensorboard"):
        train(
            [store_path],
            model_folder,
            tmp_path / "run",
            SETTINGS,
            ranks=alone("cpu"),
            tensorboard=True,
            say=pytest.fail,
        )
    assert not (tmp_path / "run").exists()


def test_what_it_is_told(store_path: Path, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: dict[tuple[str, int], float] = {}

    class SummaryWriter:
        def __init__(self, folder: str, purge_step: int) -> None:
            assert (folder, purge_step) == (str(tmp_path / "run" / "tensorboard"), 1)

        def add_scalar(self, tag: str, value: float, step: int) -> None:
            told[tag, step] = value

        def flush(self) -> None:
            pass

    module = types.ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = SummaryWriter  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name if name == "tensorboard" else find_spec(name))
    train([store_path], model_folder, tmp_path / "run", SETTINGS, ranks=alone("cpu"), tensorboard=True)
    lines = {(line["kind"], line["step"]): line for line in RunFolder.open(tmp_path / "run").metrics}
    for step in (1, 2, 3):
        line = lines["train", step]
        assert told["train/loss", step] == line["loss"]
        assert [told[f"train/accuracy/{i}", step] for i in (1, 2, 3)] == line["accuracy"]
    assert told["validation/loss", 3] == lines["validation", 3]["loss"]
    assert ("train/peak_memory", 1) not in told
