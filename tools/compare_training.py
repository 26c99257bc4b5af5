"""Training tokens/s, peak memory and losses of ours, speculators and SpecForge, on the same batches of one store.

    python tools/compare_training.py --model FOLDER --store STORE --batch-tokens 16384 --steps 30 \\
        --sides ours,ours-flex,ours-compiled,speculators --output FILE.json

STORE is one that `vllm-overlay capture` made, with the features 2, N//2, N-3 and the last state of the target in
FOLDER. `speculators` and `specforge` need speculators 0.9.0 and SpecForge 0.2.0 in the Python that runs this, the first
also a second copy of the states on the disk of --work. Each side is a process of its own (tools/training_sides.py); of
one that fails, the last lines go into the JSON in place of its figures, and the others run.

What is the same: the batches and their order, the draft's first weights, layer and vocabulary, three steps of
test-time training of weight 1, forward KL against the frozen head, the mean over the scored tokens of a step, AdamW
(betas 0.9 and 0.999, no weight decay), a constant learning rate, gradients clipped to 1, products in bfloat16 on a
GPU. What is not the same is in the JSON, in `differences`.

A step's time is from the end of the step before to its own, on the GPU's clock: reading and packing are in it, the
first steps (--warm-up) are not in the median. Tokens are those of the records, without padding. Peak memory is
torch.cuda.max_memory_allocated over the timed steps, and over all of them.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from training_sides import KNOWN_SIDES, MIB, Work, prepare

from vllm_overlay.errors import OverlayError

SIDES = Path(__file__).with_name("training_sides.py")
GRACE_SECONDS = 60  # that a side may take to end after it was to stop
ERROR_LINES = 12
DIFFERENCES = (
    "speculators pads each batch to --batch-tokens and computes every row; ours computes the rows that are scored",
    "speculators runs as `speculators train --optimizer adamw --log-freq` large: its default optimizer, Muon, has more "
    "to compute, and its default log frequency of 1 waits for the GPU several times a step",
    "speculators' two fused loss kernels are given a list of tiles each: torch 2.11 refuses to compile them with one",
    "speculators' own default draft has norm_before_residual, norm_before_fc and norm_output; here both train the form "
    "that every vLLM release reads",
    "ours uses the fused AdamW of torch, speculators the one that torch chooses",
    "specforge: its collation, model, loss and optimiser are called in a loop of ours, because its command starts "
    "SGLang; a batch is padded to its longest record, its weights are bfloat16 with float32 copies",
    "specforge's loss is another: soft cross-entropy, mean over all rows, without rows whose first choice is not in "
    "the draft's vocabulary; its mask is that of the row, not of the token that the row predicts",
    "ours trains the head by default; here it is frozen on both sides, as speculators always has it",
)


def parse_sides(text: str, known: Sequence[str] = KNOWN_SIDES) -> tuple[str, ...]:
    """ "ours,speculators" -> ("ours", "speculators"); each once, all known."""
    names = tuple(text.split(","))
    for name in names:
        if name not in known:
            raise argparse.ArgumentTypeError(f"{name!r} is no side; there are {', '.join(known)}")
    if len(set(names)) < len(names):
        raise argparse.ArgumentTypeError(f"{text!r} names a side twice")
    return names


def summarise(result: dict[str, Any], warm_up: int) -> dict[str, Any]:
    """A side's result with the median over its steps after the first `warm_up`; too few of them are an error."""
    timed = list(zip(result["tokens"], result["seconds"], strict=True))[warm_up:]
    if not timed:
        return {
            "error": f"only {len(result['tokens'])} steps were done in its time, and {warm_up} are warm-up",
            **result,
        }
    return {"tokens_per_second": statistics.median(tokens / seconds for tokens, seconds in timed), **result}


def last_lines(log: str, count: int = ERROR_LINES) -> str:
    """The end of a log, without the empty lines and what a progress bar has overwritten."""
    lines = [line.rsplit("\r", 1)[-1].rstrip() for line in log.split("\n")]
    return "\n".join([line for line in lines if line][-count:])


def describe(figures: dict[str, dict[str, Any]]) -> list[str]:
    """The table: a line a side, its loss after the tokens that all sides have seen."""
    done = [side for side, result in figures.items() if "tokens_per_second" in result]
    seen = min((len(losses) for side in done if (losses := figures[side]["losses"])), default=0)
    lines = [f"{'':16}{'tokens/s':>10}{'peak GiB':>10}{'loss':>10}  after {seen} steps"]
    for side, result in figures.items():
        if side not in done:
            lines.append(f"{side:16}failed: {result['error'].splitlines()[-1][:120]}")
            continue
        peak = "-" if result["peak_memory_bytes"] is None else f"{result['peak_memory_bytes'] / 1024 / MIB:.2f}"
        loss = f"{result['losses'][seen - 1]:.4f}" if result["losses"] else "another"
        lines.append(f"{side:16}{result['tokens_per_second']:10.0f}{peak:>10}{loss:>10}")
    theirs = [side for side in done if not side.startswith("ours")]
    for side in [side for side in done if side.startswith("ours")]:
        for other in theirs:
            ratio = figures[side]["tokens_per_second"] / figures[other]["tokens_per_second"]
            lines.append(f"{side} is {ratio:.2f} x {other}")
    return lines


def run_side(side: str, folder: Path, seconds: float) -> dict[str, Any]:
    """What the side's process wrote, or its last words. `seconds`: after which it takes no further step."""
    command = [sys.executable, str(SIDES), side, str(folder), str(folder / f"{side}.json"), str(seconds)]
    return run_process(command, folder / f"{side}.log", folder / f"{side}.json", seconds + GRACE_SECONDS)


def run_process(command: list[str], log: Path, result: Path, limit: float) -> dict[str, Any]:
    """What the process wrote into `result`, or its last words. `limit`: seconds after which it is ended."""
    began = time.monotonic()
    with log.open("w") as file:
        try:
            status: Any = subprocess.run(
                command, stdout=file, stderr=subprocess.STDOUT, timeout=limit, check=False
            ).returncode
        except subprocess.TimeoutExpired:
            status = f"stopped after {limit:.0f} s"
    wall = round(time.monotonic() - began, 1)
    if status == 0:
        return {**json.loads(result.read_text()), "wall_seconds": wall}
    said = last_lines(log.read_bytes().decode(errors="replace"))
    return {"error": f"exit status {status}\n{said}", "wall_seconds": wall}


def compare(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    work = Work(
        model=str(args.model), store=str(args.store), batch_tokens=args.batch_tokens, steps=args.steps,
        warm_up=args.warm_up, learning_rate=args.lr, draft_vocab_size=args.draft_vocab_size, workers=args.workers,
    )  # fmt: skip
    began = time.monotonic()
    prepare(work, folder, for_speculators="speculators" in args.sides)
    report: dict[str, Any] = {
        "command": f"python tools/compare_training.py --batch-tokens {work.batch_tokens} --steps {work.steps} "
        f"--sides {','.join(args.sides)}",
        "date": time.strftime("%Y-%m-%d"),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "work": asdict(work),
        "differences": list(DIFFERENCES),
        "preparing_seconds": round(time.monotonic() - began, 1),
        "sides": {},
    }
    names = {str(folder): "WORK", work.model: "MODEL", work.store: "STORE"}
    for side in args.sides:
        print(f"== {side}", flush=True)
        result = run_side(side, folder, args.side_seconds)
        report["sides"][side] = result if "error" in result else summarise(result, work.warm_up)
        text = json.dumps(name_folders(report, names), indent=1)
        args.output.write_text(text + "\n")  # what there is, if the next one takes all down
        print("\n".join(describe(report["sides"])), flush=True)
    return report


def name_folders(value: Any, names: Mapping[str, str]) -> Any:
    """The report with every text that is one of these folders, or a path in one, by its name."""
    if isinstance(value, dict):
        return {key: name_folders(each, names) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [name_folders(each, names) for each in value]
    for folder, name in sorted(names.items(), key=lambda one: -len(one[0])):  # one may lie in another
        if isinstance(value, str) and (value == folder or value.startswith(f"{folder}/")):
            return name + value[len(folder) :]
    return value


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, metavar="FOLDER", help="the target's checkpoint")
    parser.add_argument("--store", type=Path, required=True, help="of its states")
    parser.add_argument("--batch-tokens", type=int, default=16384, metavar="N", help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=30, metavar="N", help="of each side (default: %(default)s)")
    parser.add_argument("--warm-up", type=int, default=8, metavar="N", help="steps not timed (default: %(default)s)")
    parser.add_argument("--draft-vocab-size", type=int, default=32768, metavar="N", help="default: %(default)s")
    parser.add_argument("--lr", type=float, default=1e-4, help="constant (default: %(default)s)")
    parser.add_argument(
        "--sides", type=parse_sides, default=("ours", "speculators"), help=f"of {', '.join(KNOWN_SIDES)}, with commas"
    )
    parser.add_argument("--side-seconds", type=float, default=200, metavar="S", help="for each (default: %(default)s)")
    parser.add_argument("--workers", type=int, default=12, metavar="N", help="that read for speculators (default: 12)")
    parser.add_argument("--work", type=Path, metavar="FOLDER", help="new, kept; without it a temporary one is removed")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="the JSON")
    args = parser.parse_args()
    if args.steps <= args.warm_up:
        parser.error("--steps must be more than --warm-up")
    try:
        if args.work is not None:
            args.work.mkdir()
        folder = args.work or Path(tempfile.mkdtemp(prefix="compare-training-"))
        report = compare(args, folder)
    except (OverlayError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    finally:
        if args.work is None and "folder" in locals():
            shutil.rmtree(folder)
    return 0 if all("error" not in result for result in report["sides"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
