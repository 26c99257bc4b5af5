"""`vllm-overlay capture`: hidden states of a dataset's conversations into a store, through vLLM's offline engine."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_overlay.cli.output import local_folder

if TYPE_CHECKING:
    from vllm_overlay.offline.capture import CaptureSummary

HELP = "Run a dataset through vLLM and write its hidden states into a store"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("dataset", metavar="DATASET", type=Path, help="folder written by `prepare`")
    parser.add_argument("--model", required=True, metavar="MODEL", help="the target, as vLLM takes it")
    parser.add_argument(
        "-o",
        "--output",
        required=True,
        metavar="STORE",
        type=local_folder,
        help="store folder; run again to take up the rest",
    )
    parser.add_argument(
        "--layers", default="eagle3", metavar="IDS", help="eagle3, all, or ids such as 2,15,27,30 (default: eagle3)"
    )
    several = parser.add_argument_group(
        "several machines",
        "N processes, each with this same command line, take a share each. STORE and DATASET are then folders that all "
        "of them see; every replica writes a store of its own within STORE, and STORE is read as one. A replica that "
        "was lost is started again, or all are, with this N or another: only what is missing is computed. Do not "
        "start two runs of another N or dataset into one STORE at the same time.",
    )
    which = several.add_mutually_exclusive_group()
    which.add_argument(
        "--replica",
        metavar="I/N",
        help="which of N replicas this is, the first being 0/N (default: torchrun's RANK and WORLD_SIZE, or srun's "
        "SLURM_PROCID and SLURM_NTASKS, or else the only one). A replica is an engine of its own on the GPUs that it "
        "sees: give each its own, by srun --gpus-per-task, or CUDA_VISIBLE_DEVICES",
    )
    which.add_argument(
        "--ray",
        type=_positive,
        metavar="N",
        help="start N replicas on a Ray cluster by Ray Data instead (default: no): the one that RAY_ADDRESS names, or "
        "one of this machine. Ray gives each its GPUs and starts a lost one again; needs the extra: "
        "pip install 'vllm-overlay[ray]'",
    )
    parser.epilog = (
        "VLLM_OVERLAY_DTYPE=fp8 stores rows in 8 bits (default: auto, in the dtype that the model runs in). vLLM's own "
        "engine options go after --, for example: -- --dtype float32 --enforce-eager"
    )


def run(args: argparse.Namespace) -> int:
    summary = _capture(args)
    print(
        f"{summary.captured} captured, {summary.already_there} already there: {summary.num_tokens} tokens, "
        f"{summary.num_bytes} bytes of rows, {summary.seconds:.1f} s, {summary.tokens_per_second:.0f} tokens/s; "
        f"store {args.output}"
    )
    return 0


def _capture(args: argparse.Namespace) -> CaptureSummary:
    target = {
        "model": args.model,
        "store": args.output,
        "layers": args.layers,
        "engine_options": args.engine_options,
    }
    if args.ray is not None:
        from vllm_overlay.offline.ray_replicas import capture_with_ray

        return capture_with_ray(args.dataset, replicas=args.ray, **target)
    from vllm_overlay.offline.capture import capture_dataset
    from vllm_overlay.offline.replica import find_replica

    return capture_dataset(args.dataset, replica=find_replica(args.replica, os.environ), **target)


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {number}")
    return number
