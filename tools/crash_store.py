"""Kills and write faults against the store: no committed record may be lost, and none may be torn.

usage: python tools/crash_store.py [--kills 200] [--faults 200] [--seed 0] [--json FILE] [--folder FOLDER]

Each round, one or two processes write into a store: one writer, two writers, or the two pipeline stages of one engine.
In a kill, one of them gets SIGKILL, at a random moment or at a random call that changes a file: before it, after it, or
in the middle of a write. In a fault, one such call fails: EIO, a disk that is full for one call or from then on, or a
write that writes a part only; SQLite's own calls and ours alike (write_faults.c, which needs a C compiler). Then:

    a reader finds every record whose commit had returned, every value of it right, and every checksum; whatever else it
    finds is as whole
    a writer opens the same store, says what was lost, and goes on; nothing of the dead one's files is left over
    an error was the store's own and named the path

A round that its kill or fault did not reach is not counted and comes again. Exit status 1 if anything was wrong: the
store is kept then, and its folder printed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from crash_writer import RECORDS_PER_WRITER, Fault, Meeting, Plan, find_hole, list_tokens, make_rows, run_writer
from tqdm import tqdm

from vllm_overlay.store import Store, StoreError
from vllm_overlay.store.extents import merge_extents

LONGEST_ROUND_S = 60
ROUNDS_PER_STORE = 12
WRITERS = ("one writer", "one writer", "two writers", "two stages")
KILLS = ("at any moment", "kill", "kill after")
FAULTS = ("EIO", "EIO", "ENOSPC once", "disk full", "short write")
FIRST_GUESS_OF_CALLS = 150


class Wrong(Exception):
    """The store did not keep what it promises."""


@dataclass
class Child:
    """A process that writes, and what it said so far."""

    plan: Plan
    pid: int
    pipe: int
    said: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def start(cls, plan: Plan, fault: Fault, meeting: Meeting | None = None) -> Child:
        reading, writing = os.pipe()
        pid = os.fork()
        if not pid:
            os.close(reading)
            if meeting is not None:
                meeting.enter()
            run_writer(plan, fault, writing, meeting)
            os._exit(0)
        os.close(writing)
        return cls(plan, pid, reading)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> bool:
        """Until it has ended. True if it was killed. Raises Wrong if it hangs."""
        with os.fdopen(self.pipe) as lines:
            signal.alarm(LONGEST_ROUND_S)
            self.said = [json.loads(line) for line in lines]
            signal.alarm(0)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1]) != 0

    def find(self, key: str) -> list[Any]:
        return [line[key] for line in self.said if key in line]

    @property
    def committed(self) -> set[int]:
        return {number for numbers in self.find("committed") for number in numbers}


def start_children(plans: Sequence[Plan], fault: Fault) -> list[Child]:
    """A process for each plan, the first with the fault."""
    faults = [fault, Fault("none")]
    if plans[0].stage is None:
        return [Child.start(plan, each) for plan, each in zip(plans, faults, strict=False)]
    meetings = Meeting.make_pair()
    children = [Child.start(*each) for each in zip(plans, faults, meetings, strict=True)]
    for meeting in meetings:
        meeting.leave()
    return children


@dataclass
class Tally:
    """What happened over all rounds."""

    rounds: Counter[str] = field(default_factory=Counter)
    phases: Counter[str] = field(default_factory=Counter)
    absorbed: Counter[str] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


class CrashedStore:
    """One store through several rounds."""

    def __init__(self, folder: Path, tally: Tally) -> None:
        self.path = folder / "store"
        self.committed: set[int] = set()
        self._tally = tally

    def add_committed(self, children: Sequence[Child]) -> None:
        """Records that the processes were told are there: with stages, those that both were."""
        stages = [child.committed for child in children if child.plan.stage is not None]
        if stages:
            self.committed |= set.intersection(*stages)
        for child in children:
            if child.plan.stage is None:
                self.committed |= child.committed

    def check(self) -> None:
        """Read all of it. Raises Wrong."""
        try:
            store = Store.open(self.path)
        except StoreError as error:
            # No writer had come as far as the index yet.
            if not self.committed and "is not a store" in str(error):
                return
            raise Wrong(f"cannot be read: {error}") from error
        with store:
            found = Counter(self._check_record(store, index) for index in range(len(store)))
        lost = sorted(self.committed - set(found))
        if lost:
            raise Wrong(f"committed records are lost: {lost}")
        self._tally.counts["records read"] += found.total()
        self._tally.counts["more than once"] += found.total() - len(found)
        self._tally.counts["there before its commit had returned"] += len(set(found) - self.committed)

    def _check_record(self, store: Store, index: int) -> int:
        record = store[index]
        number = int(record.request_id.removeprefix("request-"))
        tokens = list_tokens(number)
        if record.token_ids.tolist() != tokens.tolist():
            raise Wrong(f"{record.request_id} has other tokens than were written")
        if record.complete != (find_hole(number) is None):
            raise Wrong(f"{record.request_id} says complete={record.complete}")
        if record.complete and not torch.equal(record.hidden_states, make_rows(tokens)):
            raise Wrong(f"{record.request_id} has other rows than were written")
        damage = store.check(index)
        if damage is not None:
            raise Wrong(str(damage))
        return number

    def go_on(self, plan: Plan, children: Sequence[Child]) -> None:
        """Open it with the next writer, which takes over what the dead ones left, and write with it. Raises Wrong."""
        unclosed = self._list_unclosed()
        warnings = self.write_without_fault(plan)
        unsaid = [log for log in unclosed if not any(f"log {log} of" in warning for warning in warnings)]
        if unsaid:
            raise Wrong(f"logs {unsaid} were cut off and nothing was said")
        with Store.open(self.path) as store:
            self._check_dropped(store, children)
            self._check_files(store)

    def write_without_fault(self, plan: Plan) -> list[str]:
        """What the writer warned of. Raises Wrong if it fails."""
        child = Child.start(plan, Fault("none"))
        child.wait()
        if child.find("error") or child.find("end") != ["done"]:
            raise Wrong(f"the next writer fails: {child.find('error') or child.find('stranger')}")
        self.add_committed([child])
        return child.find("warning")

    def _list_unclosed(self) -> list[int]:
        try:
            with Store.open(self.path) as store:
                return [log for (log,) in store.index.execute("SELECT id FROM logs WHERE closed IS NULL")]
        except StoreError:
            return []

    def _check_dropped(self, store: Store, children: Sequence[Child]) -> None:
        """What is said to be dropped are the rows that the process had appended, and that are in no record."""
        for child in children:
            if len(child.find("opened")) != 1 or not child.find("rows"):
                continue
            log, closed_cleanly, dropped = store.index.execute(
                "SELECT id, clean, dropped FROM logs WHERE pid = ? ORDER BY id DESC LIMIT 1", (child.pid,)
            )[0]
            in_records = int(merge_extents(store.index.read_extents(log))[:, 1].sum())
            self._tally.counts["rows dropped"] += dropped
            if not closed_cleanly and dropped < child.find("rows")[-1] - in_records:
                raise Wrong(f"log {log}: {dropped} rows said to be dropped, of {child.find('rows')[-1]} written")

    def _check_files(self, store: Store) -> None:
        known = {file for (file,) in store.index.execute("SELECT file FROM shards")}
        there = {f"shards/{path.name}" for path in (self.path / "shards").iterdir()}
        if known != there:
            raise Wrong(f"files left over: {sorted(there - known)}; missing: {sorted(known - there)}")
        if store.index.execute("SELECT count(*) FROM logs WHERE closed IS NULL") != [(0,)]:
            raise Wrong("a log of a dead writer was left open")


class Rounds:
    """The rounds, with every choice drawn from one seed; moments of kills depend on the machine."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.tally = Tally()
        self._random = random.Random(seed)
        self._folder = folder
        self._writers = 0
        self._stores = 0
        self._calls = dict.fromkeys(WRITERS, FIRST_GUESS_OF_CALLS)
        self._store = self._make_store()
        self._rounds_left = ROUNDS_PER_STORE

    def _make_store(self) -> CrashedStore:
        self._stores += 1
        folder = self._folder / f"{self._stores:03d}"
        folder.mkdir()
        return CrashedStore(folder, self.tally)

    def run(self, choices: Sequence[str], wanted: int, title: str) -> None:
        """As many rounds as it takes to have `wanted` that reached what was drawn from `choices`."""
        with tqdm(total=wanted, desc=title, unit="") as bar:
            while bar.n < wanted and not self.tally.wrong:
                bar.update(self._run_round(self._random.choice(choices)))

    def _run_round(self, how: str) -> bool:
        writers = self._random.choice(WRITERS)
        plans = self._draw_plans(writers)
        try:
            reached = self._crash(how, writers, plans)
        except Wrong as wrong:
            self.tally.wrong.append(f"{how}, {writers}: {wrong} ({self._store.path})")
            return False
        self._rounds_left -= 1
        if not self._rounds_left:
            shutil.rmtree(self._store.path.parent)
            self._store, self._rounds_left = self._make_store(), self._random.randint(1, ROUNDS_PER_STORE)
        if reached:
            self.tally.rounds[f"{how}, {writers}"] += 1
        return reached

    def _crash(self, how: str, writers: str, plans: Sequence[Plan]) -> bool:
        fault = Fault(how if how in Fault.NAMES else "none", self._draw_call(writers), self._random.randrange(256))
        children = start_children(plans, fault)
        if how == "at any moment":
            time.sleep(10 ** self._random.uniform(-4.3, -0.3))
            children[0].kill()
        killed = children[0].wait()
        if len(children) > 1 and self._random.random() < 0.5:
            self._open_meanwhile()
        for other in children[1:]:
            other.wait()
        self._read_reports(how, writers, children, killed)
        self._store.add_committed(children)
        if self._random.random() < 0.5:
            self._store.check()
        self._store.go_on(self._draw_plans("one writer")[0], children)
        self._store.check()
        return killed or bool(children[0].find("fault"))

    def _open_meanwhile(self) -> None:
        """A writer that comes and goes while another one is at work takes the dead one's log over."""
        (plan,) = self._draw_plans("one writer")
        self._store.write_without_fault(replace(plan, records=0))

    def _read_reports(self, how: str, writers: str, children: Sequence[Child], killed: bool) -> None:
        victim = children[0]
        for child in children:
            for stranger in child.find("stranger"):
                raise Wrong(f"an error that is none of the store's: {stranger}")
            for error in child.find("error"):
                if str(self._store.path) not in error and "rows may be lost" not in error:
                    raise Wrong(f"an error without the path: {error}")
        if killed:
            self.tally.phases[(["starting", *victim.find("at")])[-1]] += 1
            return
        self._calls[writers] = victim.find("calls")[-1]
        faults = [(line["fault"], line["file"]) for line in victim.said if "fault" in line]
        if not faults:
            return
        call, file = faults[0]
        errors = victim.find("error")
        self.tally.counts["errors said"] += len(errors)
        if how == "short write" or errors:
            self._check_end(how, victim)
            return
        name = Path(file).name
        # SQLite goes on without its shared memory's file, a checkpoint or the folder's sync, which are no promise.
        if not name.startswith("index.sqlite") and name != self._store.path.name:
            raise Wrong(f"{how} at {call} of {file} was not said")
        self.tally.absorbed[f"{call} {name}"] += 1

    def _check_end(self, how: str, victim: Child) -> None:
        may_give_up = how == "disk full" or victim.plan.stage is not None
        if victim.find("end") != ["done"] and not may_give_up:
            raise Wrong(f"after one fault ({how}) the writer could not go on: {victim.find('error')}")

    def _draw_call(self, writers: str) -> int:
        return self._random.randint(1, self._calls[writers])

    def _draw_plans(self, writers: str) -> list[Plan]:
        self._writers += 1
        first = self._writers * RECORDS_PER_WRITER
        rows_per_shard, seed = self._random.randint(5, 60), self._random.randrange(1 << 30)
        records = self._random.randint(3, 10)
        if writers == "two stages":
            stages = self._random.sample((0, 1), 2)
            return [Plan(self._store.path, first, records, rows_per_shard, stage, seed + stage) for stage in stages]
        if writers == "two writers":
            return [self._draw_plans("one writer")[0], self._draw_plans("one writer")[0]]
        return [Plan(self._store.path, first, records, rows_per_shard, None, seed)]


def compile_faults(folder: Path) -> Path:
    """Raises SystemExit if there is no C compiler."""
    library = folder / "write_faults.so"
    source = Path(__file__).with_name("write_faults.c")
    compiler = os.environ.get("CC", "cc")
    if not shutil.which(compiler):
        raise SystemExit(f"crash_store: no C compiler ({compiler}): install one, or name one in CC")
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(source), "-ldl"], check=True)
    return library


def run_rounds(args: argparse.Namespace) -> int:
    """In a process in which the faults are preloaded."""

    def give_up(*_: object) -> None:
        raise Wrong(f"a process has not ended after {LONGEST_ROUND_S} s")

    signal.signal(signal.SIGALRM, give_up)
    torch.set_num_threads(1)  # before a fork
    began = time.monotonic()
    rounds = Rounds(args.seed, args.folder)
    rounds.run(KILLS, args.kills, "kills")
    kills = Counter(rounds.tally.rounds)
    rounds.run(FAULTS, args.faults, "faults")
    report = {
        "command": f"python tools/crash_store.py --kills {args.kills} --faults {args.faults} --seed {args.seed}",
        "date": time.strftime("%Y-%m-%d"),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "sqlite": sqlite3.sqlite_version,
        },
        "seconds": round(time.monotonic() - began),
        "kills": kills.total(),
        "faults": rounds.tally.rounds.total() - kills.total(),
        **vars(rounds.tally),
    }
    print_table(report)
    if args.json is not None:
        args.json.write_text(json.dumps(report, indent=2) + "\n")
    return 1 if rounds.tally.wrong else 0


def print_table(report: dict[str, Any]) -> None:
    columns = sorted(set(WRITERS))
    print(f"{'':<16}" + "".join(f"{column:>14}" for column in columns))
    for how in (*KILLS, *dict.fromkeys(FAULTS)):
        print(f"{how:<16}" + "".join(f"{report['rounds'].get(f'{how}, {column}', 0):>14}" for column in columns))
    print(f"{report['kills']} kills and {report['faults']} faults in {report['seconds']} s")
    for title in ("phases", "absorbed", "counts"):
        print(f"{title}: " + ", ".join(f"{name} {count:,}" for name, count in sorted(report[title].items())))
    for wrong in report["wrong"]:
        print(f"WRONG: {wrong}")
    print(f"lost or torn, or not said: {len(report['wrong'])}")


def main() -> int:
    parser = argparse.ArgumentParser(description="Kill writers of a store and let their writes fail; read it after.")
    parser.add_argument("--kills", type=int, default=200, help="rounds that end with SIGKILL (default: 200)")
    parser.add_argument("--faults", type=int, default=200, help="rounds in which a call fails (default: 200)")
    parser.add_argument("--seed", type=int, default=0, help="of everything that is drawn (default: 0)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there (default: print it only)")
    parser.add_argument(
        "--folder", type=Path, help="a folder for the stores, which must be new (default: a temporary one)"
    )
    args = parser.parse_args()
    if args.folder is not None and "LD_PRELOAD" in os.environ:
        return run_rounds(args)
    folder = args.folder or Path(tempfile.mkdtemp(prefix="crash-store-"))
    folder.mkdir(exist_ok=args.folder is None)
    words = [sys.executable, __file__, *sys.argv[1:], "--folder", str(folder)]
    environment = {**os.environ, "LD_PRELOAD": str(compile_faults(folder))}
    status = subprocess.run(words, check=False, env=environment).returncode
    if status == 0:
        shutil.rmtree(folder)
    return status


if __name__ == "__main__":
    sys.exit(main())
