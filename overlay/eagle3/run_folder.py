"""The folder of a training run: settings, vocabulary, metrics, checkpoints, and the pointers `last` and `best`.

    RUN/config.json  vocabulary.safetensors  metrics.jsonl  curve.png  last  best
        checkpoints/step-00000100/  draft.safetensors  optimizer.safetensors  state.json

Every file is written under another name and renamed, so that a run killed at any moment leaves a folder that can be
resumed.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from vllm_overlay.eagle3.board import Board
from vllm_overlay.eagle3.ranks import spread_like
from vllm_overlay.errors import OverlayError

KEEP_LAST = 2
UNTRAINED = 0  # the step of the initial weights; kept for figures before and after training


@dataclass(frozen=True)
class Progress:
    """Where a run stands after `step` steps: the next batch is number `batch` of `epoch`.

    The order of an epoch is a function of (seed, epoch) and nothing else draws random numbers, so this is the whole
    state beside the weights and the optimiser. records: of a store that is followed, how many are done with.
    """

    step: int = 0
    epoch: int = 0
    batch: int = 0
    tokens: int = 0
    best_step: int = 0
    best_loss: float | None = None
    records: int = 0


@dataclass(frozen=True)
class Snapshot:
    """What a checkpoint holds: whole tensors by their names, on any device, and where the run stands."""

    draft: dict[str, torch.Tensor]
    optimizer: dict[str, torch.Tensor]
    progress: Progress


class RunFolder:
    """A run. board: what is told of each line of metrics, too."""

    def __init__(self, path: Path, board: Board | None = None) -> None:
        self.path = path
        self.board = board

    @staticmethod
    def open(path: str | Path) -> RunFolder:
        """Raises OverlayError where there is no run."""
        path = Path(path)
        if not (path / "config.json").is_file() or not (path / "last").is_file():
            raise OverlayError(f"{path}: no training run here (config.json and last are missing)")
        return RunFolder(path)

    @property
    def config(self) -> dict[str, Any]:
        config: dict[str, Any] = json.loads((self.path / "config.json").read_text())
        return config

    @property
    def metrics(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.path / "metrics.jsonl").read_text().splitlines()]

    def checkpoint(self, step: int) -> Path:
        return self.path / "checkpoints" / f"step-{step:08d}"

    def steps(self) -> list[int]:
        """The steps that have a checkpoint, ascending."""
        return sorted(int(path.name.removeprefix("step-")) for path in (self.path / "checkpoints").glob("step-*"))

    def pointer(self, name: str) -> int:
        """The step that `last` or `best` points to."""
        return int(json.loads((self.path / name).read_text())["step"])

    def find_checkpoint(self, which: str) -> Path:
        """`which`: "best", "last", "untrained" or a step. Raises OverlayError naming the steps there are."""
        if which in ("best", "last"):
            return self.checkpoint(self.pointer(which))
        if which != "untrained" and not which.isdecimal():
            raise OverlayError(f"--checkpoint {which}: give best, last, untrained or a step")
        step = UNTRAINED if which == "untrained" else int(which)
        if step not in self.steps():
            raise OverlayError(f"{self.path}: no checkpoint of step {step}; there are {self.steps()}")
        return self.checkpoint(step)

    def append_metrics(self, line: dict[str, Any]) -> None:
        with (self.path / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
        if self.board is not None:
            self.board.show(line)

    def save_checkpoint(self, snapshot: Snapshot) -> None:
        """Write a checkpoint, move the pointers, then drop what is neither best, nor of the last two, nor the
        untrained one."""
        folder, progress = self.path / "checkpoints", snapshot.progress
        folder.mkdir(exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=".writing-", dir=folder))
        save_file(snapshot.draft, str(temporary / "draft.safetensors"))
        save_file(snapshot.optimizer, str(temporary / "optimizer.safetensors"))
        (temporary / "state.json").write_text(json.dumps(asdict(progress), indent=2) + "\n")
        temporary.chmod(0o755)  # mkdtemp makes folders that others cannot read
        _sync(temporary / "draft.safetensors", temporary / "optimizer.safetensors", temporary / "state.json")
        if (self.path / "metrics.jsonl").is_file():
            _sync(self.path / "metrics.jsonl")
        temporary.rename(self.checkpoint(progress.step))
        self.point(progress)
        kept = {UNTRAINED, progress.best_step, *self.steps()[-KEEP_LAST:]}
        for step in set(self.steps()) - kept:
            shutil.rmtree(self.checkpoint(step))

    def point(self, progress: Progress) -> None:
        """`last` goes last: a checkpoint that it does not name yet is not there."""
        write_text(self.path / "best", json.dumps({"step": progress.best_step}) + "\n")
        write_text(self.path / "last", json.dumps({"step": progress.step}) + "\n")

    def load_checkpoint(self, draft: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Progress:
        """Restore the checkpoint that `last` names, into shards where the draft is sharded."""
        folder = self.checkpoint(self.pointer("last"))
        parameters = dict(draft.named_parameters())
        weights = load_file(str(folder / "draft.safetensors"))
        draft.load_state_dict({name: spread_like(tensor, parameters[name]) for name, tensor in weights.items()})
        restore_optimizer(draft, optimizer, load_file(str(folder / "optimizer.safetensors")))
        return Progress(**json.loads((folder / "state.json").read_text()))

    def rewind(self, progress: Progress) -> None:
        """Forget what a killed run did after its last checkpoint, so that no step is in the metrics twice."""
        for leftover in (self.path / "checkpoints").glob(".writing-*"):
            shutil.rmtree(leftover)
        for step in self.steps():
            if step > progress.step:
                shutil.rmtree(self.checkpoint(step))
        kept = []
        for line in (self.path / "metrics.jsonl").read_text().splitlines(keepends=True):
            # A line without its end is one that the kill cut; it is later than the checkpoint, which syncs this file.
            if not line.endswith("\n") or json.loads(line)["step"] > progress.step:
                break
            kept.append(line)
        write_text(self.path / "metrics.jsonl", "".join(kept))
        self.point(progress)


def require_free(path: Path) -> None:
    """Raises OverlayError where a new run cannot be made."""
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise OverlayError(f"{path}: is not empty; continue that run with --resume, or choose another folder")


def write_text(path: Path, text: str) -> None:
    """Write a small file whole or not at all."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text)
    _sync(temporary)
    temporary.replace(path)


def optimizer_tensors(draft: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """AdamW's state by parameter name: `NAME/step`, `NAME/exp_avg`, `NAME/exp_avg_sq`. Empty before the first step."""
    return {
        f"{name}/{key}": value
        for name, parameter in draft.named_parameters()
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def restore_optimizer(
    draft: torch.nn.Module, optimizer: torch.optim.Optimizer, tensors: dict[str, torch.Tensor]
) -> None:
    """The inverse of `optimizer_tensors`, on the device and in the shards of the parameters; the count of steps is on
    every rank."""
    parameters = dict(draft.named_parameters())
    for key, tensor in tensors.items():
        name, fact = key.rsplit("/", 1)
        parameter = parameters[name]
        restored = tensor.to(parameter.device) if fact == "step" else spread_like(tensor, parameter)
        optimizer.state[parameter][fact] = restored


def _sync(*paths: Path) -> None:
    for path in paths:
        with path.open("rb") as file:
            os.fsync(file.fileno())
