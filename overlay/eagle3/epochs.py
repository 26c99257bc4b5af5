"""Where the batches of a run come from when its stores are whole: every record, in another order in each epoch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from vllm_overlay.eagle3.data import Corpus, Entry, open_corpus, plan_epoch, split
from vllm_overlay.eagle3.run_folder import Progress
from vllm_overlay.eagle3.settings import Settings


@dataclass(frozen=True)
class Planned:
    """The records of a global batch, and where a run stands that has learnt from it."""

    entries: list[Entry]
    epoch: int
    batch: int  # number of the next one in the epoch
    records: int = 0  # of a followed store, those that are done with


class Source(Protocol):
    """Gives a run its records. `training`: those that the draft's vocabulary is chosen from; of a store that is
    followed, those that there are at the start."""

    corpus: Corpus
    training: list[Entry]
    held_out: list[Entry]

    @property
    def digest(self) -> str:
        """Of the data: an exact resume needs the same."""

    def count_steps(self, epochs: int) -> int | None:
        """How many batches there are; None where nobody knows."""

    def plan(self, progress: Progress) -> Iterator[Planned]:
        """The batches from where `progress` stands, the same for any number of ranks."""

    def end(self) -> None:
        """No more batches are wanted: wakes a plan that waits for records."""

    def release(self, progress: Progress) -> None:
        """A checkpoint stands at `progress`: a run goes on from there or later."""

    def close(self) -> None: ...


class Epochs:
    """Whole stores, for ever; `split` off are the records that are held out."""

    def __init__(self, corpus: Corpus, settings: Settings) -> None:
        self.corpus = corpus
        self.training, self.held_out = split(corpus.entries, settings.holdout)
        self._batch_tokens, self._seed = settings.batch_tokens, settings.seed

    @classmethod
    def open(cls, stores: Sequence[str | Path], settings: Settings) -> Epochs:
        """Raises OverlayError as `open_corpus` and `split`."""
        corpus = open_corpus(stores, settings.features, settings.max_length)
        try:
            return cls(corpus, settings)
        except BaseException:
            corpus.close()
            raise

    @property
    def digest(self) -> str:
        return self.corpus.digest()

    def count_steps(self, epochs: int) -> int | None:
        return sum(len(self._plan_epoch(epoch)) for epoch in range(epochs))

    def _plan_epoch(self, epoch: int) -> list[list[Entry]]:
        return plan_epoch(self.training, self._batch_tokens, self._seed, epoch)

    def plan(self, progress: Progress) -> Iterator[Planned]:
        epoch, first = progress.epoch, progress.batch
        while True:
            batches = self._plan_epoch(epoch)
            for index in range(first, len(batches)):
                yield Planned(batches[index], epoch, index + 1)
            epoch, first = epoch + 1, 0

    def end(self) -> None:
        """Nothing waits here."""

    def release(self, progress: Progress) -> None:
        """Records are learnt from again."""

    def close(self) -> None:
        self.corpus.close()
