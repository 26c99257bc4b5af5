"""Two drafts for one target, from one store, after the same time: ours and one that speculators 0.9.0 trained.

    python tools/compare_drafts.py --model FOLDER --store STORE --seconds 600 --draft-vocab-size 16384 \\
        --batch-tokens 16384 --sides ours-compiled,speculators --together --output FOLDER

STORE is one that `vllm-overlay capture` made, with the features 2, N//2, N-3 and the last state of the target in the
model's FOLDER. `speculators` needs speculators 0.9.0 in the Python that runs this, and a second copy of the states on
the disk of --work. Each side is a process of its own (tools/draft_sides.py); of one that fails, the last lines go into
the JSON in place of its figures, the other's are kept, and the exit status is 1.

A side trains for --seconds from the end of its first step, on as many batches as fit. That step, which compiles, is not
in the time, and nothing is learnt in it: the learning rate is 0 where the time begins, rises in a line over the first
5% of it, and falls as a cosine to 0 at its end. With --together all sides run at the same time on the one GPU, and the
time of each begins when all have ended their first step.

OUTPUT/SIDE is the draft, in bfloat16, as vLLM serves it: OUTPUT/speculators is its own checkpoint without the target's
embeddings. `vllm-overlay evaluate` serves it too but measures the plain form alone by its chain: tools/plain_draft.py.
OUTPUT/drafts.json has the figures, and in `differences` what is not the same.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from compare_training import name_folders, parse_sides, run_process
from draft_sides import KNOWN_SIDES, MEETING_SECONDS, WARM_UP, Work, prepare
from training_sides import MIB

from vllm_overlay.errors import OverlayError

SIDES = Path(__file__).with_name("draft_sides.py")
GRACE_SECONDS = 300  # of a side, to start and to save
DIFFERENCES = (
    "the same on both sides: the store, the target, the draft's vocabulary, three steps of test-time training, tokens "
    "a batch at most, products in bfloat16 on a GPU, gradients clipped to 1, the course of the learning rate, the time",
    "ours is what `vllm-overlay train` does by default: the head and the layer start from the target's, both are "
    "trained; soft cross-entropy with the target's head, the steps weighted 1, 0.8 and 0.64; AdamW (betas 0.9 and "
    "0.95, no decay) with a peak of --lr; no further norms but with --norms, and then those of speculators' draft",
    "speculators is what `speculators train` does by default: a layer of random weights that it makes itself (without "
    "--from-pretrained: its embeddings and heads are then the target's, looked at in 0.9.0), a frozen head; KL to that "
    "head, the steps weighted alike; Muon for matrices and AdamW for the rest, both with a peak of 1e-3; "
    "norm_before_residual, norm_before_fc and norm_output; a sliding window of 2048",
    "speculators' options that are not its defaults: --draft-vocab-size, --total-seq-len and --num-workers as asked; "
    "--scheduler-type none, as the rate follows the time here (its own: linear, from 1% of the steps on); --log-freq "
    "large, as it waits for the GPU at each line; --train-data-ratio so that one record is left for the validation "
    "that is not run here (its own: a tenth of the data)",
    "speculators' batches are its own sampler's, an epoch after another with what that costs; it pads a batch to its "
    "full length, ours computes the rows that are scored",
    "speculators' two fused loss kernels are given a list of tiles each: torch 2.11 refuses to compile them with one",
    "in separate runs of this tool, as tools/gpu_checks.sh has them, the two drafts of ours share a GPU and "
    "speculators has one to itself; where there is one alone, speculators compiles on the CPU while ours train on it",
    "each side's loop waits for the step before the last, so that it knows the time: speculators' own does not wait",
    "both drafts are rounded to bfloat16, as speculators saves its own",
)


def describe(figures: dict[str, dict[str, Any]]) -> list[str]:
    """A line a side."""
    lines = []
    for side, result in figures.items():
        if "error" in result:
            lines.append(f"{side}: failed: {result['error'].splitlines()[-1][:120]}")
            continue
        peak = result["peak_memory_bytes"]
        lines.append(
            f"{side}: {result['steps']} steps, {result['tokens']} tokens ({result['tokens'] / result['seconds']:.0f} a "
            f"second), {result['tokens'] / result['tokens_an_epoch']:.1f} epochs in {result['seconds']:.1f} s, loss "
            f"{result['first_loss']:.3f} to {result['last_loss']:.3f}, its first step after "
            f"{result['seconds_until_the_first_step_ended']:.0f} s, "
            f"{sum(result['file_bytes'].values()) / MIB:.1f} MiB of files"
            + ("" if peak is None else f", {peak / 1024 / MIB:.1f} GiB of the GPU")
        )
    return lines


def run_side(side: str, work: Work, folder: Path) -> dict[str, Any]:
    """What the side's process wrote, or its last words; the other side is told of the latter."""
    log, result = folder / f"{side}.log", folder / f"{side}.json"
    limit = work.seconds + MEETING_SECONDS + GRACE_SECONDS
    found = run_process([sys.executable, str(SIDES), side, str(folder), str(result)], log, result, limit)
    if "error" in found:
        (folder / f"{side}.failed").touch()
        return found
    return {**found, "file_bytes": {path.name: path.stat().st_size for path in (Path(work.output) / side).iterdir()}}


def compare(work: Work, folder: Path, *, strict: bool) -> dict[str, Any]:
    began = time.monotonic()
    self_test = prepare(work, folder, strict=strict)
    norms = " --norms" if work.norms else ""
    together = " --together" if work.together else ""
    report: dict[str, Any] = {
        "command": f"python tools/compare_drafts.py --seconds {work.seconds:g} --batch-tokens {work.batch_tokens} "
        f"--draft-vocab-size {work.draft_vocab_size} --lr {work.learning_rate:g} --sides {','.join(work.sides)}"
        f"{norms}{together}",
        "date": time.strftime("%Y-%m-%d"),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "work": asdict(work),
        "learning_rate": f"up in a line over the first {WARM_UP:.0%} of the seconds, then a cosine to 0",
        "self_test": self_test,
        "differences": list(DIFFERENCES),
        "preparing_seconds": round(time.monotonic() - began, 1),
        "sides": {},
    }
    write(report, work, folder)
    print(f"{self_test}; prepared in {report['preparing_seconds']:.0f} s", flush=True)
    with ThreadPoolExecutor(len(work.sides) if work.together else 1) as pool:
        running = {pool.submit(run_side, side, work, folder): side for side in work.sides}
        for done in as_completed(running):
            report["sides"][running[done]] = done.result()
            write(report, work, folder)  # what there is, if the next one takes all down
            print("\n".join(describe({running[done]: done.result()})), flush=True)
    return report


def write(report: dict[str, Any], work: Work, folder: Path) -> None:
    """What there is, with names in the place of folders, which say nothing where the figures are read."""
    names = {str(folder): "WORK", work.model: "MODEL", work.store: "STORE", work.output: "OUTPUT"}
    text = json.dumps(name_folders(report, names), indent=1)
    Path(work.output, "drafts.json").write_text(text + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, metavar="FOLDER", help="the target's checkpoint")
    parser.add_argument("--store", type=Path, required=True, help="of its states")
    parser.add_argument("--seconds", type=float, default=600, metavar="S", help="of each side (default: %(default)s)")
    parser.add_argument("--batch-tokens", type=int, default=16384, metavar="N", help="default: %(default)s")
    parser.add_argument("--draft-vocab-size", type=int, default=16384, metavar="N", help="default: %(default)s")
    parser.add_argument("--lr", type=float, default=1e-3, help="ours at its peak (default: %(default)s)")
    parser.add_argument(
        "--sides", type=partial(parse_sides, known=KNOWN_SIDES), default=("ours-compiled", "speculators"),
        help=f"of {', '.join(KNOWN_SIDES)}, with commas (default: ours-compiled,speculators)",
    )  # fmt: skip
    parser.add_argument("--norms", action="store_true", help="ours with the norms of speculators' own draft")
    parser.add_argument("--together", action="store_true", help="all at the same time, on the one GPU")
    parser.add_argument(
        "--self-test", choices=("strict", "warn"), default="strict",
        help="as of `vllm-overlay train`: refuse, or only say it (default: strict)",
    )  # fmt: skip
    parser.add_argument("--workers", type=int, default=6, metavar="N", help="that read for speculators (default: 6)")
    parser.add_argument(
        "--work", type=Path, metavar="FOLDER", help="new, for the second copy of the states; removed (default: in TMP)"
    )
    parser.add_argument("--output", type=Path, required=True, metavar="FOLDER", help="new, of the drafts and the JSON")
    args = parser.parse_args()
    work = Work(
        model=str(args.model), store=str(args.store), output=str(args.output), seconds=args.seconds,
        batch_tokens=args.batch_tokens, draft_vocab_size=args.draft_vocab_size, learning_rate=args.lr,
        workers=args.workers, norms=args.norms, sides=args.sides, together=args.together,
    )  # fmt: skip
    try:
        report = compare_in(args.work, work, strict=args.self_test == "strict")
    except (OverlayError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0 if all("error" not in result for result in report["sides"].values()) else 1


def compare_in(new_folder: Path | None, work: Work, *, strict: bool) -> dict[str, Any]:
    """With a work folder that is removed. An output folder in which nothing was written is not left either."""
    if new_folder is not None:
        new_folder.mkdir()
    folder = new_folder or Path(tempfile.mkdtemp(prefix="compare-drafts-"))
    try:
        Path(work.output).mkdir()
        try:
            return compare(work, folder, strict=strict)
        finally:
            with suppress(OSError):  # it is not empty
                Path(work.output).rmdir()
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    sys.exit(main())
