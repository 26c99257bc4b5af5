"""What torchrun starts for `test_fsdp_gpu`, by `python training_ranks.py PLAN.json`: runs of training one after the
other by one group of ranks, because starting torch and NCCL takes longer than most of them.

The plan holds `device` and `tasks`, a list of Task.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from tests.eagle3.rank_programs import Job, do
from vllm_overlay.eagle3.ranks import Ranks, join_ranks
from vllm_overlay.eagle3.run_folder import RunFolder
from vllm_overlay.eagle3.trainer import Trainer


@dataclass(frozen=True)
class Task:
    """A run by all ranks, or by the first one `alone`. In step `dies_at` the last rank is killed."""

    job: Job
    alone: bool = False
    dies_at: int | None = None


@contextmanager
def dying(dies_at: int | None, ranks: Ranks) -> Iterator[None]:
    take_step: Callable[..., Any] = Trainer.take_step

    def take_or_die(self: Trainer, step: int, share: Any) -> Any:
        if step == dies_at and ranks.number == ranks.size - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return take_step(self, step, share)

    with mock.patch.object(Trainer, "take_step", take_or_die):
        yield


def do_task(task: Task, ranks: Ranks) -> None:
    """Steps in 32 bits add up in a fixed order, where torch has one to offer: a resumed run can be compared by bits."""
    torch.use_deterministic_algorithms(task.job.settings["dtype"] == "float32", warn_only=True)
    forget_the_run_before(ranks.device)
    started = time.monotonic()
    if task.alone and ranks.is_first:
        do(task.job, Ranks(0, 1, ranks.device))
    if not task.alone:
        with dying(task.dies_at, ranks):
            do(task.job, ranks)
    ranks.wait()
    if ranks.is_first:
        print(f"{describe(task.job)}; done in {time.monotonic() - started:.1f} s", flush=True)


def forget_the_run_before(device: torch.device) -> None:
    """Its memory and the most that it took, for a run's `peak_memory` is to be its own; and what it compiled, for torch
    compiles a function so many times only."""
    torch.compiler.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def describe(job: Job) -> str:
    """What there is to see of a run, should a later one be cut off."""
    run = RunFolder.open(job.run)
    lines = [line for line in run.metrics if line["kind"] == "train"]
    seconds = [round(line["seconds"], 3) for line in lines]
    return f"{run.path.name}: loss {lines[0]['loss']:.4f} -> {lines[-1]['loss']:.4f}, seconds of each step {seconds}"


def main(plan: dict[str, Any]) -> None:
    with join_ranks(plan["device"]) as ranks:
        for task in plan["tasks"]:
            do_task(Task(**{**task, "job": Job(**task["job"])}), ranks)


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
