"""What the rows of one big step take to be written, in milliseconds: the wait at the end of a run that captures.

usage: python tools/append_cost.py [--rows 16384] [--hidden 4096] [--lanes 8 12] [--mebibytes 64 128] [--rounds 5]
       [--store FOLDER]

Rows of four layers in bfloat16, by default those of a prefill step of 16,384 tokens of an 8B model (512 MiB), go
through StoreWriter into files of each size with each number of lanes, `append`, and then 256 records of them are
committed, `commit`: the times of each round. Where there is a GPU, first what the way from it to pinned memory takes.
The store is written below --store (default: a temporary folder; /dev/shm for what the disk does not limit) and removed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from vllm_overlay.store import PendingRecord, StoreMeta, StoreWriter, lanes

LAYER_IDS = (2, 16, 29, 32)
RECORDS = 256


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=16384, help="tokens of the step (default: 16384)")
    parser.add_argument("--hidden", type=int, default=4096, help="numbers in a row (default: 4096)")
    parser.add_argument("--lanes", type=int, nargs="+", default=[8, 12], help="default: 8 12; no more than cores count")
    parser.add_argument("--mebibytes", type=int, nargs="+", default=[64, 128], help="of a file (default: 64 128)")
    parser.add_argument("--rounds", type=int, default=5, help="default: 5")
    parser.add_argument("--store", help="folder for the store (default: a temporary one)")
    args = parser.parse_args()
    rows = make_rows(args.rows, args.hidden)
    print(f"{rows.nbytes / 2**20:.0f} MiB of rows", flush=True)
    if torch.cuda.is_available():
        on_device = rows.to("cuda")
        print(
            "device to host:", [measure(lambda: copy_to_host(on_device, rows)) for _ in range(args.rounds)], flush=True
        )
    for num_lanes in args.lanes:
        lanes.MOST_LANES = num_lanes
        for size in args.mebibytes:
            with tempfile.TemporaryDirectory(prefix="vllm-overlay-append-cost-", dir=args.store) as folder:
                append, commit = measure_writer(Path(folder) / "store", rows, size << 20, args.rounds)
            print(f"{num_lanes} lanes, files of {size} MiB: append {append}, commit {commit}", flush=True)
    return 0


def make_rows(count: int, hidden: int) -> torch.Tensor:
    """`[rows, layers, hidden]`, in pinned memory where there is a GPU."""
    rows = torch.empty(count, len(LAYER_IDS), hidden, dtype=torch.bfloat16, pin_memory=torch.cuda.is_available())
    return rows.normal_()


def copy_to_host(on_device: torch.Tensor, rows: torch.Tensor) -> None:
    rows.copy_(on_device, non_blocking=True)
    torch.cuda.synchronize()


def measure_writer(store: Path, rows: torch.Tensor, file_bytes: int, rounds: int) -> tuple[list[float], list[float]]:
    """Milliseconds of each round's append, and of its commit."""
    meta = StoreMeta(LAYER_IDS, rows.shape[2], "bfloat16", LAYER_IDS[-1], "made up", "f" * 64, "none", "V2")
    appends, commits = [], []
    with StoreWriter.open(store, meta, rows_per_shard=max(1, file_bytes // meta.row_bytes)) as opened:
        for number in range(rounds):
            first = opened.num_rows
            appends.append(measure(opened.append, rows))
            records = make_records(number, first, len(rows) // RECORDS)
            commits.append(measure(opened.commit, records))
    return appends, commits


def make_records(number: int, first_row: int, length: int) -> list[PendingRecord]:
    """RECORDS records of as many rows each."""
    return [
        PendingRecord(
            request_id=f"{number}-{place}",
            token_ids=np.arange(length, dtype=np.int64),
            rows=np.arange(length, dtype=np.int64) + first_row + place * length,
            num_prompt_tokens=length,
            complete=True,
            finish_reason="length",
            tag=None,
            loss_mask=None,
        )
        for place in range(RECORDS)
    ]


def measure(call: Callable[..., object], *arguments: object) -> float:
    """Milliseconds."""
    began = time.perf_counter()
    call(*arguments)
    return round(1000 * (time.perf_counter() - began), 1)


if __name__ == "__main__":
    sys.exit(main())
