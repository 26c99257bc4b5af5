"""What torchrun starts for `test_ranks`, by `python rank_programs.py JOBS OPTIONS...`: the jobs, and then the command
`train OPTIONS...`, which fails. All by one group, because starting torch takes longer than they do."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any
from unittest import mock

from vllm_overlay.cli import main
from vllm_overlay.eagle3 import training
from vllm_overlay.eagle3.data import Corpus
from vllm_overlay.eagle3.ranks import Ranks
from vllm_overlay.eagle3.settings import Settings
from vllm_overlay.eagle3.trainer import Trainer
from vllm_overlay.eagle3.training import Result, train
from vllm_overlay.errors import OverlayError


class Interrupted(Exception):
    """A run that a test breaks off."""


@dataclass(frozen=True)
class Job:
    """One call of `train`; `stop_after`: the last step that it gets to."""

    store: str
    model: str
    run: str
    settings: dict[str, Any]
    resume: bool = False
    stop_after: int | None = None
    self_test: str = "strict"


@contextmanager
def interrupted(stop_after: int | None) -> Iterator[None]:
    """Every rank breaks off before the same step."""
    take_step: Callable[..., Any] = Trainer.take_step

    def take_or_stop(self: Trainer, step: int, share: Any) -> Any:
        if stop_after is not None and step > stop_after:
            raise Interrupted
        return take_step(self, step, share)

    with mock.patch.object(Trainer, "take_step", take_or_stop), suppress(Interrupted):
        yield


def do(job: Job, ranks: Ranks) -> None:
    features = job.settings["features"]
    settings = Settings(**{**job.settings, "features": features and tuple(features)})
    # Drawing the curve takes twice as long as such a run, and test_training looks at it.
    with interrupted(job.stop_after), mock.patch.object(training, "plot_curve"):
        train([job.store], job.model, job.run, settings, ranks=ranks, resume=job.resume, self_test=job.self_test)


def fail_on_the_second_rank(*arguments: Any, **options: Any) -> Result:
    """`train`, where rank 1 cannot read its fifth batch."""
    read = Corpus.read_states
    count = 0

    def read_or_fail(self: Corpus, entries: Any, **options: Any) -> Any:
        nonlocal count
        count += 1
        if os.environ["RANK"] == "1" and count == 5:
            raise OverlayError("the fifth batch cannot be read")
        return read(self, entries, **options)

    with mock.patch.object(Corpus, "read_states", read_or_fail):
        return train(*arguments, **options)


def do_jobs_and_fail(jobs: str, options: list[str]) -> int:
    """The command line, in whose group of ranks the jobs are done before."""

    def do_and_fail(*arguments: Any, ranks: Ranks, **named: Any) -> Result:
        for facts in json.loads(jobs):
            do(Job(**facts), ranks)
        return fail_on_the_second_rank(*arguments, ranks=ranks, **named)

    with mock.patch.object(training, "train", do_and_fail):
        return main(["train", *options])


if __name__ == "__main__":
    sys.exit(do_jobs_and_fail(sys.argv[1], sys.argv[2:]))
