"""The sides of tools/compare_drafts.py, which runs `python tools/draft_sides.py SIDE WORK RESULT`.

Ours is `Trainer` with the defaults of `vllm-overlay train`. speculators is the command `speculators train`, whose
trainer goes on until the time is over and takes the learning rate that goes with it; its code is as installed.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from training_sides import (
    CPU_FLAGS,
    DATA,
    NEVER,
    OURS,
    Enough,
    describe_draft,
    find_vocabulary,
    list_places,
    make_draft,
    refuse_cut_records,
    run_speculators,
    version,
    write_checkpoint,
    write_data,
)

from vllm_overlay.eagle3.clock import Moment
from vllm_overlay.eagle3.data import open_corpus
from vllm_overlay.eagle3.epochs import Epochs
from vllm_overlay.eagle3.export import vllm_config
from vllm_overlay.eagle3.ranks import alone
from vllm_overlay.eagle3.run_folder import Progress
from vllm_overlay.eagle3.selftest import measure_agreement
from vllm_overlay.eagle3.settings import Settings
from vllm_overlay.eagle3.target import load_target
from vllm_overlay.eagle3.trainer import Trainer, load_ahead, num_tokens, peak_memory
from vllm_overlay.eagle3.training import choose_attention
from vllm_overlay.errors import OverlayError

TTT_STEPS = 3
WARM_UP = 0.05  # of the time
CURVE_POINTS = 50
LAST_STEPS = 20  # that the last loss is a mean of
MEETING_SECONDS = 600
KNOWN_SIDES = (*OURS, "speculators")


@dataclass(frozen=True)
class Work:
    """What the sides are asked to do. `norms`: ours with those of speculators' drafts. `together`: all at the same
    time, on one GPU."""

    model: str
    store: str
    output: str
    seconds: float
    batch_tokens: int
    draft_vocab_size: int
    learning_rate: float
    workers: int
    norms: bool
    sides: tuple[str, ...]
    together: bool

    def settings(self, attention: str, compile: bool) -> Settings:
        """The defaults, but for a learning rate that this loop sets: without a last step and a warm-up it is the same
        at every step."""
        return Settings(
            draft_vocab_size=self.draft_vocab_size, ttt_steps=TTT_STEPS, steps=None, warmup=0.0,
            learning_rate=self.learning_rate, batch_tokens=self.batch_tokens, holdout=0.0,
            dtype="bfloat16" if torch.cuda.is_available() else "float32", attention=attention, compile=compile,
            norm_before_residual=self.norms, norm_before_fc=self.norms, norm_output=self.norms,
        )  # fmt: skip


def rate_at(part: float) -> float:
    """The learning rate as a share of its peak, after this part of the time: up in a line, then a cosine to zero."""
    if part < WARM_UP:
        return part / WARM_UP
    return 0.5 * (1 + math.cos(math.pi * (min(part, 1.0) - WARM_UP) / (1 - WARM_UP)))


@dataclass
class SpanClock:
    """`seconds` from the end of the first step. The host is given back when the step before is done, so that it is
    never more than one step ahead of a GPU, and the time is the GPU's. `meet`: called when the first step is done."""

    device: torch.device
    seconds: float
    meet: Callable[[], None]
    created: float = field(default_factory=time.monotonic)
    steps: int = 0
    first_step_seconds: float | None = None
    began: float | None = None
    last: Moment | None = None

    def tick(self) -> float:
        """A step was given to the device. The part of the time that is over; all of it raises Enough."""
        self.steps += 1
        before, self.last = self.last, Moment.mark(self.device)
        if before is None or self.began is None:
            self.last.wait()
            self.first_step_seconds = round(time.monotonic() - self.created, 2)
            self.meet()
            self.began = time.monotonic()
            return 0.0
        before.wait()
        part = (time.monotonic() - self.began) / self.seconds
        if part >= 1:
            raise Enough
        return part

    def figures(self) -> dict[str, Any]:
        """To be asked for when the time is over."""
        assert self.last is not None and self.began is not None
        self.last.wait()
        return {
            "steps": self.steps,
            "seconds": round(time.monotonic() - self.began, 2),
            "seconds_until_the_first_step_ended": self.first_step_seconds,
            "peak_memory_bytes": peak_memory(self.device),
        }


def meet(folder: Path, side: str, sides: Sequence[str], limit: float = MEETING_SECONDS) -> None:
    """Say that this side is ready, and wait until all are. Raises OverlayError: one has failed, or takes too long."""
    (folder / f"{side}.ready").touch()
    until = time.monotonic() + limit
    for other in sides:
        while not (folder / f"{other}.ready").exists():
            if (folder / f"{other}.failed").exists():
                raise OverlayError(f"{other} failed before the end of its first step: the two cannot begin together")
            if time.monotonic() > until:
                raise OverlayError(f"{other} has not ended its first step {limit:.0f} s after {side} did")
            time.sleep(0.02)


def describe_losses(losses: Sequence[float]) -> dict[str, Any]:
    """The first, the mean of the last ones, and means over equal parts of the steps."""
    edges = [len(losses) * point // CURVE_POINTS for point in range(CURVE_POINTS + 1)]
    parts = [losses[start:end] for start, end in pairwise(edges) if end > start]
    return {
        "first_loss": round(losses[0], 5),
        "last_loss": round(statistics.fmean(losses[-LAST_STEPS:]), 5),
        "loss_curve": [round(statistics.fmean(part), 5) for part in parts],
    }


def prepare(work: Work, folder: Path, *, strict: bool) -> str:
    """Write into the work folder what the sides read. Returns what the self-test says of the store.

    Raises OverlayError: a store that cannot be trained on or would not be read alike, or, if `strict`, whose states the
    self-test does not take for the model's.
    """
    corpus = open_corpus([work.store])
    try:
        refuse_cut_records(corpus, work.store)
        target = load_target(work.model)
        agreement = measure_agreement(corpus, target, torch.device("cpu"))
        if strict and agreement.is_suspicious:
            raise OverlayError(f"{work.store}: {agreement.describe()}: are the states those of {work.model}?")
        if "speculators" in work.sides:
            write_data(corpus, find_vocabulary(corpus, target, work.draft_vocab_size), folder / DATA)
    finally:
        corpus.close()
    (folder / "work.json").write_text(json.dumps(asdict(work)))
    return agreement.describe()


def train_ours(work: Work, folder: Path, side: str, clock: SpanClock) -> dict[str, Any]:
    settings = work.settings(*OURS[side])
    target, source = load_target(work.model), Epochs.open([work.store], settings)
    choose_attention(settings.attention, clock.device, target.config.head_dim, settings.dtype)
    vocabulary = find_vocabulary(source.corpus, target, work.draft_vocab_size)
    draft = make_draft(source.corpus, target, vocabulary, norms=work.norms).to(clock.device)
    trainer = Trainer(draft, target, vocabulary, source, settings, alone())
    loaded = load_ahead(source.plan(Progress()), lambda planned: trainer.load(planned.entries), clock.device)
    taken, tokens, part, epoch = [], 0, 0.0, 0
    try:
        for number, (planned, share) in enumerate(loaded, 1):
            trainer.settings = replace(settings, learning_rate=settings.learning_rate * rate_at(part))
            taken.append(trainer.take_step(number, share))
            tokens, epoch = tokens + num_tokens(share.entries), planned.epoch
            part = clock.tick()
            if len(taken) > 1 and not math.isfinite(float(taken[-2].figures[0])):
                raise OverlayError(f"step {number - 1}: the gradient is not finite")
    except Enough:
        pass
    figures = clock.figures()
    loaded.close()
    lines = [trainer.figures(each.figures[1:].view(3, -1), each.counts) for each in taken]
    facts = describe_draft(draft.config, target, work.model, source.corpus.meta.model_fingerprint)
    tensors = {name: tensor.to("cpu", torch.bfloat16) for name, tensor in draft.state_dict().items()}
    if not vocabulary.is_full:
        tensors |= {"d2t": vocabulary.d2t, "t2d": vocabulary.t2d}
    write_checkpoint(Path(work.output) / side, vllm_config(facts, "bfloat16", figures["steps"]), tensors)
    return {
        **figures,
        "tokens": tokens,
        "epochs": epoch,
        "tokens_an_epoch": num_tokens(source.training),
        "loss_is": "soft cross-entropy with the target's head, the sum of three steps weighted 1, 0.8 and 0.64",
        **describe_losses([line["loss"] for line in lines]),
        "last_accuracy_per_step": lines[-1]["accuracy"],
        "settings": {**asdict(settings), "version": version("vllm-overlay")},
    }


def speculators_flags(work: Work, folder: Path, records: int, on_gpu: bool) -> list[str]:
    """The options of `speculators train`: the data, and what the loop of this tool asks for. All else is its own."""
    return [
        "--verifier-name-or-path", work.model, "--data-path", str(folder / DATA), "--save-path", str(folder / "theirs"),
        "--draft-vocab-size", str(work.draft_vocab_size), "--total-seq-len", str(work.batch_tokens),
        "--ttt-steps", str(TTT_STEPS), "--train-data-ratio", str((records - 0.5) / records), "--on-missing", "raise",
        "--num-workers", str(work.workers), "--scheduler-type", "none", "--log-freq", str(NEVER),
        "--no-resume-from-checkpoint", *([] if on_gpu else CPU_FLAGS),
    ]  # fmt: skip


def train_speculators(work: Work, folder: Path, side: str, clock: SpanClock) -> dict[str, Any]:
    corpus = open_corpus([work.store])
    records = len(list_places(corpus))
    corpus.close()
    losses: list[torch.Tensor] = []
    found: dict[str, Any] = {}

    def run_training(trainer: Any) -> None:
        """Epochs of its own order until the time is over; nothing is validated, and saved at the end alone."""
        trainer.model.register_forward_hook(lambda module, args, output: losses.append(output[1].detach()))
        groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
        peaks = [group["lr"] for group in groups]

        def set_rate(part: float) -> None:
            for group, peak in zip(groups, peaks, strict=True):
                group["lr"] = peak * rate_at(part)

        sampler, lengths = trainer.train_loader.batch_sampler, []
        set_rate(0.0)
        try:
            for epoch in count():
                found["epochs"] = epoch
                lengths += [int(sampler.lengths[batch].sum()) for batch in sampler._generate_batches(epoch)]
                trainer.train_epoch(epoch, step_callback=lambda: set_rate(clock.tick()))
        except Enough:
            pass
        found["figures"] = clock.figures()
        found["tokens"] = sum(lengths[: clock.steps])
        found["optimizers"] = {
            type(optimizer).__name__: {
                "lr": peak, "numbers": sum(one.numel() for group in optimizer.param_groups for one in group["params"])
            }
            for optimizer, peak in zip(trainer.optimizers, peaks, strict=True)
        }  # fmt: skip
        found["tokens_an_epoch"] = int(sampler.lengths.sum())
        trainer.maybe_save_checkpoint(0)

    flags = speculators_flags(work, folder, records, clock.device.type == "cuda")
    run_speculators(flags, clock.device, run_training)
    left_out = keep_speculators_draft(folder / "theirs" / "0", Path(work.output) / side, work.model)
    return {
        **found["figures"],
        "tokens": found["tokens"],
        "epochs": found["epochs"],
        "tokens_an_epoch": found["tokens_an_epoch"],
        "loss_is": "its default, KL to the frozen head over the draft's vocabulary, the sum of three steps",
        **describe_losses([float(loss) for loss in losses]),
        "settings": {"flags": flags, "optimizers": found["optimizers"], "version": version("speculators")},
        "left_out_of_its_checkpoint": left_out,
    }


def keep_speculators_draft(checkpoint: Path, folder: Path, model: str) -> list[str]:
    """Copy its checkpoint, without the embeddings where they are the target's own: vLLM shares those with a draft that
    has none. Returns what is left out."""
    tensors, target = load_file(str(checkpoint / "model.safetensors")), load_target(model)
    for name, tensor in tensors.items():
        if not torch.isfinite(tensor.float()).all():
            raise OverlayError(f"{checkpoint}: {name} is not finite")
    embeddings = tensors.get("embed_tokens.weight")
    left_out = []
    if embeddings is not None and torch.equal(embeddings, target.embed_tokens.to(embeddings.dtype)):
        del tensors["embed_tokens.weight"]
        left_out.append("embed_tokens.weight")
    write_checkpoint(folder, json.loads((checkpoint / "config.json").read_text()), tensors)
    return left_out


def main() -> int:
    side, folder, result = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    content = json.loads((folder / "work.json").read_text())
    os.environ["HF_HUB_OFFLINE"] = "1"
    work = Work(**{**content, "sides": tuple(content["sides"])})
    others = work.sides if work.together else ()
    clock = SpanClock(alone().device, work.seconds, lambda: meet(folder, side, others))
    train = train_speculators if side == "speculators" else train_ours
    try:
        figures = train(work, folder, side, clock)
    except OverlayError as error:
        print(error, file=sys.stderr)
        return 1
    result.write_text(json.dumps(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
