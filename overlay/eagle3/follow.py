"""Training from a store while it is written: each record once, in the order of arrival, and removed when it is done
with, if so wanted.

A checkpoint says how many records it has learnt from; nothing later than the last checkpoint is removed, so a run that
was killed goes on as if nothing had happened. Where more comes than is learnt from, and disk is bounded, the oldest
records are passed over.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from vllm_overlay.eagle3.data import Entry, open_stores, read_entries
from vllm_overlay.eagle3.epochs import Planned
from vllm_overlay.eagle3.run_folder import Progress
from vllm_overlay.eagle3.settings import Settings
from vllm_overlay.errors import OverlayError
from vllm_overlay.store import JoinedStore, Store, find_stores
from vllm_overlay.store.retire import Retirer

POLL_S = 0.5
RECORDS_AT_ONCE = 256
FOLLOWED = "followed, made at "  # what a digest begins with that is none of the data, for they have no end


@dataclass(frozen=True)
class Following:
    """How a store is followed.

    first_tokens: to be there before the draft's vocabulary is chosen and the self-test made. keep_bytes: of rows, on
    disk; None removes nothing. idle_seconds: without a new record until the run ends; None waits for ever.
    """

    first_tokens: int
    keep_bytes: int | None = None
    idle_seconds: float | None = None


class Follower:
    """The records of a live store as they come. Made once it has its first ones; ended by `stop`, or by a silence."""

    def __init__(
        self,
        path: Path,
        settings: Settings,
        following: Following,
        *,
        resumes: bool,
        stop: threading.Event,
        say: Callable[[str], None],
    ) -> None:
        """Waits for the store, and for its first records unless the run `resumes`.

        Raises OverlayError: several replicas' stores in one folder, one that rows cannot be removed from, fewer bytes
        to keep than a batch takes, a layer id that it does not have, or an end before there was enough.
        """
        self._path, self._settings, self._following, self._stop, self._say = path, settings, following, stop, say
        self._last_arrival = time.monotonic()
        self._read = 0  # of the first ones
        self._released = 0
        self._passed_over = 0
        self.held_out: list[Entry] = []
        say(f"following {path}: each record once, and none held out, for none has been seen when its loss is taken")
        self._wait_for(lambda: bool(find_stores(path)), "there is no store")
        self.corpus = open_stores([path], settings.features)
        try:
            if isinstance(self._store, JoinedStore):
                raise OverlayError(f"{path}: holds several replicas' stores; follow one of them")
            self._retirer = None if following.keep_bytes is None else self._make_retirer(following.keep_bytes)
            if not resumes:
                self._wait_for(self._read_first, f"there are not {following.first_tokens} tokens (--first-tokens)")
        except BaseException:
            self.corpus.close()
            raise
        self.training = self.corpus.entries

    @property
    def digest(self) -> str:
        """Says which store it is: from another one, rows would be removed that were not learnt from."""
        return f"{FOLLOWED}{self._store.index.execute('SELECT created FROM meta')[0][0]}"

    @property
    def _store(self) -> Store:
        return self.corpus.stores[0]

    def _make_retirer(self, keep_bytes: int) -> Retirer:
        least = self._settings.batch_tokens * self._store.meta.row_bytes
        if keep_bytes < least:
            raise OverlayError(
                f"--keep-bytes {keep_bytes}: a batch takes {least} bytes ({self._settings.batch_tokens} tokens of "
                f"{self._store.meta.row_bytes}); keep several times what the engine's KV cache holds in rows"
            )
        return Retirer(self._path)

    def _wait_for(self, comes: Callable[[], bool], lacking: str) -> None:
        if comes():
            return
        self._say(f"{self._path}: {lacking} yet; waiting")
        while not comes():
            if self._is_over():
                raise OverlayError(f"{self._path}: nothing to learn from: {lacking}, and the run was ended")
            self._stop.wait(POLL_S)

    def _is_over(self) -> bool:
        idle = self._following.idle_seconds
        return self._stop.is_set() or (idle is not None and time.monotonic() - self._last_arrival > idle)

    def _read_first(self) -> bool:
        """Whether there are enough."""
        count = len(self._store)
        if count > self._read:
            self.corpus.add(0, range(self._read, count), self._settings.max_length)
            self._read, self._last_arrival = count, time.monotonic()
        return sum(entry.num_tokens for entry in self.corpus.entries) >= self._following.first_tokens

    def count_steps(self, epochs: int) -> int | None:
        return None

    def plan(self, progress: Progress) -> Iterator[Planned]:
        """The batches after the records that are done with. The last one is taken as it is after a silence, and left
        for another time if the run is stopped."""
        batch, filled, size = progress.batch, list[Entry](), 0
        for entry in self._arrivals(progress.records):
            if filled and size + entry.num_tokens > self._settings.batch_tokens:
                batch += 1
                yield Planned(filled, 0, batch, entry.index)
                filled, size = [], 0
            filled.append(entry)
            size += entry.num_tokens
        if filled and not self._stop.is_set():
            yield Planned(filled, 0, batch + 1, filled[-1].index + 1)

    def _arrivals(self, place: int) -> Iterator[Entry]:
        while True:
            count = self._look()
            place = self._pass_over(place, count)
            if place < count:
                self._last_arrival = time.monotonic()
                until = min(count, place + RECORDS_AT_ONCE)
                entries, _ = read_entries(self._store, 0, range(place, until), self._settings.max_length)
                yield from entries
                place = until
            if self._is_over():
                return
            if place == count:
                self._stop.wait(POLL_S)

    def _look(self) -> int:
        """How many records there are, after what is done with was removed."""
        if self._retirer is None or self._following.keep_bytes is None:
            return len(self._store)
        if self._retirer.retire(self._released, self._following.keep_bytes).files:
            # What is mapped into memory keeps its place on disk.
            self._store.close()
            self.corpus.stores[0] = Store.open(self._path)
        return self._retirer.update()

    def _pass_over(self, place: int, count: int) -> int:
        """The first record to learn from, if all from `place` on that are there took more disk than they may."""
        if self._following.keep_bytes is None:
            return place
        lengths = self._store.index.execute("SELECT num_tokens FROM records WHERE id > ? ORDER BY id", (place,))
        excess = sum(length for (length,) in lengths) * self._store.meta.row_bytes - self._following.keep_bytes
        begin = place
        for (length,) in lengths[: count - place]:
            if excess <= 0:
                break
            excess -= length * self._store.meta.row_bytes
            place += 1
        if place > begin:
            self._passed_over += place - begin
            self._say(f"training is behind: {place - begin} records passed over, {self._passed_over} in all")
        return place

    def end(self) -> None:
        self._stop.set()

    def release(self, progress: Progress) -> None:
        self._released = progress.records

    def close(self) -> None:
        """Removes what the last checkpoint is done with."""
        self._look()
        if self._retirer is not None:
            self._retirer.close()
        self.corpus.close()


@contextmanager
def stopping_at_signals(say: Callable[[str], None]) -> Iterator[threading.Event]:
    """An event that the first SIGINT or SIGTERM sets; the second one does what it did before."""
    stop = threading.Event()
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def end(number: int, frame: FrameType | None) -> None:
        restore()
        say(f"{signal.Signals(number).name}: the run ends after this step, with a checkpoint")
        stop.set()

    for number in before:
        signal.signal(number, end)
    try:
        yield stop
    finally:
        restore()
