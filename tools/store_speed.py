"""How fast a store is written and read, as a share of what the disk gives to plain writes and reads of the same bytes.

usage: python tools/store_speed.py FOLDER [--mib 1024] [--rounds 3] [--warm] [--dtype bfloat16|fp8] [--beside N]
                                          [--json FILE]

Makes a store in FOLDER, which must be new, through StoreWriter, with rows of the shape of EAGLE-3 on Llama-3.1-8B (4
layers of 4096 in bfloat16, 32 KiB a token) and records of 64 to 1024 tokens, and removes it at the end. Then, a round:

    write     append every record, commit about every 128 MiB, close; against write() of the same bytes and one fsync
    in order  copy every record's hidden states into one buffer; against readinto() of the shard files, as large pieces
    shuffled  the same in a random order; against readinto() of such pieces of the shard files in a random order
    batches   the same, 16 records at a time by Store.read_states, as training reads them; against the same

Before each reading pass the shards are dropped from the page cache (POSIX_FADV_DONTNEED, needs no root), and mincore
says what share of their pages was left. With --warm they stay where the writing left them. The medians of the rounds
are shown. What lies below the system, a host's cache for a virtual disk, cannot be dropped from here.

With --beside N, N records are written at a time, a row of each after the other, as requests are that are decoded beside
each other: every row of a record then lies by itself. Without it the rows of a record lie together, as a prompt's do.

With --dtype fp8 rows are in float8, packed before and made bfloat16 as they are read; bytes are those on disk.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import platform
import random
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tqdm import tqdm

from vllm_overlay.store import PendingRecord, Store, StoreError, StoreMeta, StoreWriter, float8, pack_rows

MIB = 1 << 20
COMMIT_BYTES = 128 * MIB
SHORTEST, LONGEST = 64, 1024  # tokens of a record
BATCH = 16  # records
PASSES = ("write", "plain write", "in order", "plain in order", "shuffled", "plain shuffled", "batches")
# What each is a share of.
PLAIN = {
    "write": "plain write", "in order": "plain in order", "shuffled": "plain shuffled", "batches": "plain shuffled",
}  # fmt: skip
BFLOAT16 = StoreMeta(
    layer_ids=(2, 16, 29, 32),
    hidden_size=4096,
    dtype="bfloat16",
    num_hidden_layers=32,
    model="made up",
    model_fingerprint="made up",
    vllm_version="none",
    runner="V1",
)
METAS = {"bfloat16": BFLOAT16, "fp8": replace(BFLOAT16, dtype=float8.DTYPE)}


def choose_lengths(meta: StoreMeta, mib: int, seed: int) -> list[int]:
    """Tokens of each record, `mib` MiB in all."""
    chosen, left, source = [], mib * MIB // meta.row_bytes, random.Random(seed)
    while left:
        chosen.append(min(left, source.randint(SHORTEST, LONGEST)))
        left -= chosen[-1]
    return chosen


def write_store(folder: Path, meta: StoreMeta, lengths: Sequence[int], rows: torch.Tensor, beside: int) -> float:
    """Seconds from the opening of the writer to its end. beside: records that are written at a time."""
    started = time.perf_counter()
    with StoreWriter.open(folder, meta) as writer:
        waiting: list[PendingRecord] = []
        for number in range(0, len(lengths), beside):
            for place, numbers in enumerate(append_beside(writer, lengths[number : number + beside], rows)):
                waiting.append(_make_record(number + place, numbers))
            if sum(len(record.rows) for record in waiting) * meta.row_bytes >= COMMIT_BYTES:
                writer.commit(waiting)
                waiting = []
        writer.commit(waiting)
    return time.perf_counter() - started


def append_beside(writer: StoreWriter, lengths: Sequence[int], rows: torch.Tensor) -> list[NDArray[np.int64]]:
    """Append records a row of each at a time, a single one at once. The rows' numbers of each."""
    if len(lengths) == 1:
        first = writer.append(rows[: lengths[0]])
        return [np.arange(first, first + lengths[0])]
    numbers: list[NDArray[np.int64]] = [np.empty(length, dtype=np.int64) for length in lengths]
    for step in range(max(lengths)):
        alive = [mine for mine in numbers if step < len(mine)]
        first = writer.append(rows[: len(alive)])
        for place, mine in enumerate(alive):
            mine[step] = first + place
    return numbers


def _make_record(number: int, rows: NDArray[np.int64]) -> PendingRecord:
    return PendingRecord(
        request_id=str(number),
        token_ids=np.arange(len(rows), dtype=np.int64),
        rows=rows,
        num_prompt_tokens=1,
        complete=True,
        finish_reason="length",
        tag=None,
        loss_mask=None,
    )


def write_plainly(path: Path, lengths: Sequence[int], rows: torch.Tensor) -> float:
    data = memoryview(rows.view(torch.uint8).flatten().numpy().data)
    started = time.perf_counter()
    with path.open("wb", buffering=0) as file:
        for length in lengths:
            file.write(data[: length * rows[0].nbytes])
        os.fsync(file.fileno())
    seconds = time.perf_counter() - started
    path.unlink()
    return seconds


def read_store(folder: Path, order: Sequence[int], out: torch.Tensor) -> float:
    started = time.perf_counter()
    with Store.open(folder) as store:
        for number in order:
            hidden_states = store[number].hidden_states
            out[: len(hidden_states)].copy_(hidden_states)
    return time.perf_counter() - started


def read_batches(folder: Path, order: Sequence[int], lengths: Sequence[int], out: torch.Tensor) -> float:
    started = time.perf_counter()
    with Store.open(folder) as store:
        for first in range(0, len(order), BATCH):
            numbers = order[first : first + BATCH]
            ends = list(accumulate(lengths[number] for number in numbers))
            places = [slice(end - lengths[number], end) for number, end in zip(numbers, ends, strict=True)]
            store.read_states(numbers, places, out[: ends[-1]])
    return time.perf_counter() - started


def read_plainly(pieces: Sequence[tuple[Path, int, int]], out: torch.Tensor) -> float:
    """Read (file, first byte, bytes) one after the other, each into the same memory."""
    data = memoryview(out.view(torch.uint8).flatten().numpy().data)
    started = time.perf_counter()
    files = {path: path.open("rb", buffering=0) for path, _, _ in pieces}
    for path, begin, count in pieces:
        files[path].seek(begin)
        if files[path].readinto(data[:count]) != count:
            raise StoreError(f"{path} gave fewer than {count} bytes at {begin}: nothing was measured")
    for file in files.values():
        file.close()
    return time.perf_counter() - started


def cut_shards(shards: Sequence[Path], size: int) -> list[tuple[Path, int, int]]:
    """All bytes of the files, in pieces of `size` at most."""
    return [
        (path, begin, min(size, path.stat().st_size - begin))
        for path in shards
        for begin in range(0, path.stat().st_size, size)
    ]


def drop_cache(shards: Sequence[Path]) -> None:
    """Nothing may have the files mapped: such pages stay."""
    for path in shards:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def measure_cached(shards: Sequence[Path]) -> float:
    """The share of the files' pages that are in the page cache."""
    libc = ctypes.CDLL(None, use_errno=True)
    pages = cached = 0
    for path in shards:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE) as content:
            states = (ctypes.c_ubyte * -(-len(content) // mmap.PAGESIZE))()
            start = ctypes.c_char.from_buffer(content)
            failed = libc.mincore(ctypes.byref(start), ctypes.c_size_t(len(content)), states)
            del start  # or the map cannot be closed
            if failed:
                raise StoreError(f"cannot tell what is cached of {path}: {os.strerror(ctypes.get_errno())}")
            pages += len(states)
            cached += sum(state & 1 for state in states)
    return cached / pages


def make_rows(meta: StoreMeta) -> torch.Tensor:
    """LONGEST rows as they are appended."""
    rows = torch.randn(LONGEST, *meta.row_shape, generator=torch.Generator().manual_seed(0)).bfloat16()
    return pack_rows(rows) if meta.is_packed else rows


def measure(folder: Path, meta: StoreMeta, mib: int, rounds: int, warm: bool, beside: int) -> dict[str, Any]:
    """MB/s of each pass in each round, and what share of the shards was cached before each reading pass."""
    lengths = choose_lengths(meta, mib, seed=0)
    rows = make_rows(meta)
    out = torch.empty(BATCH * LONGEST, *meta.row_shape, dtype=meta.torch_dtype)
    total = sum(lengths) * meta.row_bytes
    rates: dict[str, list[float]] = {name: [] for name in PASSES}
    cached: list[float] = []
    bar = tqdm(total=rounds * len(PASSES), unit="pass", disable=None)

    def note(name: str, run: Callable[[], float]) -> None:
        rates[name].append(total / run() / 1e6)
        bar.update()

    def note_reading(name: str, run: Callable[[], float]) -> None:
        if not warm:
            drop_cache(shards)
        cached.append(measure_cached(shards))
        note(name, run)

    for round_ in range(rounds):
        store = folder / f"store-{round_}"
        note("write", lambda: write_store(store, meta, lengths, rows, beside))  # noqa: B023 - run at once
        note("plain write", lambda: write_plainly(folder / "plain", lengths, rows))
        shards = sorted(store.glob("shards/*.safetensors"))
        order = random.Random(round_).sample(range(len(lengths)), len(lengths))
        pieces = cut_shards(shards, total // len(lengths))
        mixed = random.Random(round_).sample(pieces, len(pieces))
        note_reading("in order", lambda: read_store(store, range(len(lengths)), out))  # noqa: B023
        note_reading("plain in order", lambda: read_plainly(pieces, out))  # noqa: B023
        note_reading("shuffled", lambda: read_store(store, order, out))  # noqa: B023
        note_reading("plain shuffled", lambda: read_plainly(mixed, out))  # noqa: B023
        note_reading("batches", lambda: read_batches(store, order, lengths, out))  # noqa: B023
        shutil.rmtree(store)
    bar.close()
    return {
        "records": len(lengths), "beside": beside, "bytes": total, "dtype": meta.dtype, "MB/s": rates,
        "cached": cached, "warm": warm,
    }  # fmt: skip


def show(report: dict[str, Any]) -> None:
    state = "warm: left in the page cache" if report["warm"] else "dropped from the page cache before each pass"
    beside = f", {report['beside']} at a time" if report["beside"] > 1 else ""
    print(f"{report['records']} records{beside}, {report['bytes'] / MIB:.0f} MiB, {report['dtype']}; shards {state}")
    cached = f"{min(report['cached']):.0%} to {max(report['cached']):.0%}"
    print(f"({cached} of their pages were cached before a pass). Medians of {report['rounds']}, MB/s:\n")
    print(f"{'':10}{'store':>8}{'plain':>8}{'share':>8}")
    for name, against in PLAIN.items():
        ours, plain = (statistics.median(report["MB/s"][each]) for each in (name, against))
        print(f"{name:10}{ours:8.0f}{plain:8.0f}{ours / plain:8.0%}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="a new folder, on the disk to measure")
    parser.add_argument("--mib", type=int, default=1024, help="size of the store (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--warm", action="store_true", help="leave the shards in the page cache")
    parser.add_argument("--dtype", choices=list(METAS), default="bfloat16", help="default: %(default)s")
    parser.add_argument(
        "--beside", type=int, default=1, metavar="N", help="records that are written at a time (default: %(default)s)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there too")
    args = parser.parse_args()
    if args.mib < 1 or args.rounds < 1 or not 1 <= args.beside <= LONGEST:
        parser.error(f"--mib and --rounds must be at least 1, --beside from 1 to {LONGEST}")
    try:
        args.folder.mkdir()
    except OSError as error:
        print(f"cannot make {args.folder}: {error.strerror}; name a new folder", file=sys.stderr)
        return 1
    try:
        measured = measure(args.folder, METAS[args.dtype], args.mib, args.rounds, args.warm, args.beside)
    except (StoreError, OSError) as error:
        print(f"{error}", file=sys.stderr)
        return 1
    finally:
        shutil.rmtree(args.folder)
    report = {
        "command": f"python tools/store_speed.py FOLDER --mib {args.mib} --rounds {args.rounds}"
        + (" --warm" if args.warm else "")
        + (f" --dtype {args.dtype}" if args.dtype != "bfloat16" else "")
        + (f" --beside {args.beside}" if args.beside > 1 else ""),
        "date": time.strftime("%Y-%m-%d"),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "cpus": os.cpu_count(),
        "rounds": args.rounds,
        **measured,
    }
    show(report)
    if args.json is not None:
        args.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
