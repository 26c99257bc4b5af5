"""The process that crash_store.py kills: it writes known rows and records, and says what it did as it goes.

What a row and a record hold follows from the record's number alone, so that a reader can tell a torn or crossed one.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_overlay.store import Part, PendingRecord, StoreError, StoreMeta, StoreWriter

HIDDEN = 64
META = StoreMeta((2, 4, 6), HIDDEN, "float32", 6, "made up", "f" * 64, "none", "V2")
STAGES = ((0, 1), (2,))  # the columns that each of two pipeline stages writes
RECORDS_PER_WRITER = 1000  # numbers that a writer may give to its records
LONGEST = 40  # tokens
POSITIONS = 1 << 8
NO_RECORD = 0  # owner of rows that get into no record
TRIES = 3  # of a batch with one writer, and of opening writers


@dataclass(frozen=True)
class Plan:
    """What one process writes. `first` is the number of its first record, `stage` its pipeline stage or None."""

    store: Path
    first: int
    records: int
    rows_per_shard: int
    stage: int | None
    seed: int


@dataclass(frozen=True)
class Fault:
    """What write_faults.c does at the `at`-th call that changes a file; a write of which a part is written gets that
    many 256ths done.
    """

    name: str
    at: int = 0
    part: int = 0

    NAMES = ("none", "kill", "kill after", "EIO", "ENOSPC once", "disk full", "short write")


def arm(fault: Fault, folder: Path, report: int) -> None:
    """Let it happen in this process, to files below `folder`."""
    number = ctypes.c_long(fault.at)
    path = os.fsencode(folder)
    ctypes.CDLL(None).faults_arm(path, Fault.NAMES.index(fault.name), number, fault.part, report)


def count_calls() -> int:
    count = ctypes.CDLL(None).faults_calls
    count.restype = ctypes.c_long
    return int(count())


def list_tokens(number: int) -> NDArray[np.int64]:
    """The token ids of record `number`, int64 `[T]`: which record's rows they are, and which position.

    Every fourth record begins with half of the one before it, as prompts with the same prefix do.
    """
    tokens = number * POSITIONS + np.arange(1 + number * 7919 % LONGEST, dtype=np.int64)
    if number % 4 != 3:
        return tokens
    before = list_tokens(number - 1)
    return np.concatenate((before[: len(before) // 2 + 1], tokens))


def find_hole(number: int) -> int | None:
    """The position at which record `number` has no row, if it is an incomplete one."""
    return len(list_tokens(number)) // 2 if number % 11 == 5 else None


def make_rows(tokens: NDArray[np.int64]) -> torch.Tensor:
    """The rows of these tokens, float32 `[T, layers, HIDDEN]`; every number is exact."""
    rows = np.empty((len(tokens), len(META.layer_ids), HIDDEN), dtype=np.float32)
    rows[..., 0::2] = (tokens // POSITIONS)[:, None, None]
    rows[..., 1::2] = (tokens % POSITIONS)[:, None, None] * 4 + np.arange(len(META.layer_ids))[None, :, None]
    return torch.from_numpy(rows)


@dataclass(frozen=True)
class Meeting:
    """No stage of an engine writes before all have opened the store; here the other one may have died before.

    Each of two processes has the writing end of one pipe, which closes when it has come so far or is dead, and the
    reading end of the other's. `strange` are the ends that are for the other process.
    """

    own: int
    other: int
    strange: tuple[int, int]

    @classmethod
    def make_pair(cls) -> tuple[Meeting, Meeting]:
        (first_read, first_write), (second_read, second_write) = os.pipe(), os.pipe()
        return (
            cls(first_write, second_read, (first_read, second_write)),
            cls(second_write, first_read, (second_read, first_write)),
        )

    def enter(self) -> None:
        """In the process whose it is."""
        for end in self.strange:
            os.close(end)

    def attend(self) -> None:
        """This one has opened the store; wait for the other."""
        os.close(self.own)
        os.read(self.other, 1)

    def leave(self) -> None:
        """In the process that started both, after that."""
        os.close(self.own)
        os.close(self.other)


class WriterProcess:
    """Writes what a plan says, and reports every step in a line of JSON."""

    def __init__(self, plan: Plan, report: int, meeting: Meeting | None) -> None:
        self._plan = plan
        self._report = report
        self._meeting = meeting
        self._random = random.Random(plan.seed)
        self._left = list(range(plan.first, plan.first + plan.records))

    def run(self) -> None:
        """Write all records, with another writer where one fails for good. Reports "done" or "gave up"."""
        handler = logging.Handler()
        handler.emit = lambda record: self._say(warning=record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("vllm_overlay.store").addHandler(handler)
        # A stage whose writer fails for good ends its engine.
        for _ in range(TRIES if self._plan.stage is None else 1):
            try:
                self._write_with_one_writer()
            except StoreError as error:
                self._say(error=str(error))
            if not self._left:
                break
        self._say(end="gave up" if self._left else "done", calls=count_calls())

    def _write_with_one_writer(self) -> None:
        plan = self._plan
        part = None
        if plan.stage is not None:
            part = Part(f"engine {plan.first}", plan.stage, len(STAGES), STAGES[plan.stage])
        self._say(at="opening")
        writer = StoreWriter.open(plan.store, META, rows_per_shard=plan.rows_per_shard, part=part)
        self._say(at="writing", opened=True)
        if self._meeting is not None:
            self._meeting.attend()
        try:
            rows_of_tokens: dict[int, int] = {}
            while self._left:
                self._write_batch(writer, self._left[: self._random.randint(1, 3)], rows_of_tokens)
        finally:
            self._say(at="closing")
            writer.close()

    def _write_batch(self, writer: StoreWriter, numbers: Sequence[int], rows_of_tokens: dict[int, int]) -> None:
        for trial in range(TRIES):
            try:
                self._say(at="writing")
                records = [self._write_record(writer, number, rows_of_tokens) for number in numbers]
                self._say(at="committing")
                writer.commit(records)
            except StoreError as error:
                if trial == TRIES - 1:
                    raise
                self._say(error=str(error))
            else:
                self._say(committed=numbers)
                del self._left[: len(numbers)]
                return

    def _write_record(self, writer: StoreWriter, number: int, rows_of_tokens: dict[int, int]) -> PendingRecord:
        if self._random.random() < 0.3:  # of a request that never ends
            self._append(writer, np.full(self._random.randint(1, 5), NO_RECORD, dtype=np.int64))
        tokens = list_tokens(number)
        fresh = np.array([token for token in tokens.tolist() if token not in rows_of_tokens], dtype=np.int64)
        steps = np.array_split(fresh, self._random.randint(1, 3))
        for step in steps:
            first = self._append(writer, step)
            rows_of_tokens.update(zip(step.tolist(), range(first, first + len(step)), strict=True))
        rows = np.array([rows_of_tokens[token] for token in tokens.tolist()], dtype=np.int64)
        hole = find_hole(number)
        if hole is not None:
            rows[hole] = -1
        name, offset = f"request-{number}", number - self._plan.first
        return PendingRecord(name, tokens, rows, 1, hole is None, "stop", None, None, number=offset)

    def _append(self, writer: StoreWriter, tokens: NDArray[np.int64]) -> int:
        rows = make_rows(tokens)
        if self._plan.stage is not None:
            rows = rows[:, list(STAGES[self._plan.stage])].contiguous()
        first = writer.append(rows)
        self._say(rows=writer.num_rows)
        return first

    def _say(self, **facts: Any) -> None:
        os.write(self._report, json.dumps(facts).encode() + b"\n")


def run_writer(plan: Plan, fault: Fault, report: int, meeting: Meeting | None) -> None:
    """In a process of its own: write, with the fault, and report an error that is none of the store's as well."""
    try:
        arm(fault, plan.store.parent, report)
        WriterProcess(plan, report, meeting).run()
    except BaseException as error:  # noqa: BLE001 - a defect of the store: the parent names it
        os.write(report, json.dumps({"stranger": f"{type(error).__name__}: {error}"}).encode() + b"\n")
