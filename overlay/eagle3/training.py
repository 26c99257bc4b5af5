"""Training a draft, top to bottom: open, choose, check, then steps of AdamW with test-time training, checkpoints
between."""

from __future__ import annotations

import json
import math
import platform
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from vllm_overlay.eagle3.batch import pack
from vllm_overlay.eagle3.curve import plot_curve
from vllm_overlay.eagle3.data import Corpus, Entry, open_corpus, plan_batches, plan_epoch, split
from vllm_overlay.eagle3.draft import Draft
from vllm_overlay.eagle3.initialisation import create_draft, draft_config
from vllm_overlay.eagle3.loss import StepScores, TargetHead, combine, score_steps
from vllm_overlay.eagle3.run_folder import Progress, RunFolder, require_free
from vllm_overlay.eagle3.selftest import CAUSES, measure_agreement
from vllm_overlay.eagle3.target import Target, load_target
from vllm_overlay.eagle3.vocabulary import DraftVocabulary, choose_vocabulary, count_tokens
from vllm_overlay.errors import OverlayError
from vllm_overlay.fingerprint import fingerprint_model

DEFAULT_DRAFT_VOCABULARY = 32768
BETAS = (0.9, 0.95)


@dataclass(frozen=True)
class Settings:
    """What shapes the result. A resumed run must have the same; None is filled in from the data when the run is
    made."""

    features: tuple[int, ...] | None = None
    draft_vocab_size: int | None = None
    hidden_size: int | None = None
    norm_before_residual: bool = False
    init: str = "target"
    ttt_steps: int = 3
    step_weight: float = 0.8
    epochs: int = 3
    steps: int | None = None
    learning_rate: float = 1e-3
    warmup: float = 0.05
    weight_decay: float = 0.0
    gradient_clip: float = 1.0
    batch_tokens: int = 2048
    max_length: int = 4096
    holdout: float = 0.05
    seed: int = 0
    checkpoint_every: int = 100
    dtype: str = "auto"


@dataclass(frozen=True)
class Result:
    """A finished run: the first and last losses are those of the first draft position, in nats."""

    run: Path
    steps: int
    tokens: int
    first_loss: float
    last_loss: float
    held_out_accuracy: tuple[float, ...] | None


def train(
    stores: Sequence[str | Path],
    model: str | Path,
    run: str | Path,
    settings: Settings,
    *,
    device: str = "auto",
    self_test: str = "warn",
    resume: bool = False,
    say: Callable[[str], None] = print,
) -> Result:
    """Train a draft for `model` (a local checkpoint folder) from `stores` into the folder `run`.

    self_test: "strict" (refuse), "warn" or "off". Raises OverlayError for everything a user can put right.
    """
    run = Path(run)
    if resume:
        RunFolder.open(run)
    else:
        require_free(run)
    place = choose_device(device)
    target = load_target(model)
    corpus = open_corpus(stores, settings.features, settings.max_length)
    try:
        _require_same_model(corpus, target)
        training, held_out = split(corpus.entries, settings.holdout)
        counted, present = count_tokens(
            ((entry.token_ids, entry.loss_mask) for entry in training), target.config.vocab_size
        )
        _say_other_weights(say, corpus, target)
        settings = _settle(settings, corpus, target, training, place)
        size = settings.draft_vocab_size or target.config.vocab_size
        vocabulary = choose_vocabulary(counted, present, size, target.config.special_token_ids)
        _say_data(say, corpus, training, held_out, counted, vocabulary)
        _run_self_test(say, corpus, target, place, self_test)

        shape = draft_config(
            target.config,
            corpus.feature_ids,
            len(vocabulary),
            hidden_size=settings.hidden_size,
            norm_before_residual=settings.norm_before_residual,
        )
        draft = create_draft(shape, target, vocabulary, settings.init, settings.seed).to(place)
        facts = _describe_run(settings, stores, corpus, target, draft, place)
        trainer = Trainer(draft, target, vocabulary, corpus, training, held_out, settings, place)
        if resume:
            folder = RunFolder.open(run)
            _require_same_run(folder, facts)
            progress = folder.load_checkpoint(draft, trainer.optimizer)
            folder.rewind(progress)
            say(f"resuming {run} at step {progress.step} of {settings.steps}")
        else:
            folder, progress = _create_run(run, facts, vocabulary, trainer)
        trainer.run_from(folder, progress)
        plot_curve(folder.metrics, folder.path / "curve.png")
        return _summarise(folder)
    finally:
        corpus.close()


class Trainer:
    """The loop and what it needs on the device."""

    def __init__(
        self,
        draft: Draft,
        target: Target,
        vocabulary: DraftVocabulary,
        corpus: Corpus,
        training: list[Entry],
        held_out: list[Entry],
        settings: Settings,
        device: torch.device,
    ) -> None:
        self.draft, self.corpus, self.settings, self.device = draft, corpus, settings, device
        self.training = training
        self.held_out = plan_batches(held_out, settings.batch_tokens)
        self.head = TargetHead(
            target.final_norm.to(device, torch.float32),
            target.config.rms_norm_eps,
            target.lm_head[vocabulary.ids].to(device, torch.float32),
        )
        self.optimizer = torch.optim.AdamW(
            draft.parameters(), lr=settings.learning_rate, betas=BETAS, weight_decay=settings.weight_decay, fused=True
        )

    @property
    def total_steps(self) -> int:
        assert self.settings.steps is not None
        return self.settings.steps

    def run_from(self, folder: RunFolder, progress: Progress) -> None:
        """Train to the last step, with a checkpoint at every `checkpoint_every` steps and at the end."""
        bar = tqdm(total=self.total_steps, initial=progress.step, unit="step", dynamic_ncols=True, desc="train")
        for epoch, index, entries in self.batches(progress):
            if progress.step >= self.total_steps:
                break
            line = self.take_step(progress.step + 1, entries)
            folder.append_metrics(line)
            progress = replace(
                progress, step=progress.step + 1, epoch=epoch, batch=index + 1, tokens=progress.tokens + line["tokens"]
            )
            bar.update()
            speed = line["tokens"] / line["seconds"]
            bar.set_postfix_str(f"loss {line['loss']:.3f}, first {line['accuracy'][0]:.1%}, {speed:.0f} tokens/s")
            if progress.step % self.settings.checkpoint_every == 0 or progress.step == self.total_steps:
                progress = self.keep(folder, progress)
        bar.close()

    def batches(self, progress: Progress) -> Iterator[tuple[int, int, list[Entry]]]:
        """(epoch, number in the epoch, records), from where `progress` stands, for ever."""
        epoch, first = progress.epoch, progress.batch
        while True:
            batches = plan_epoch(self.training, self.settings.batch_tokens, self.settings.seed, epoch)
            for index in range(first, len(batches)):
                yield epoch, index, batches[index]
            epoch, first = epoch + 1, 0

    def take_step(self, step: int, entries: list[Entry]) -> dict[str, Any]:
        """One optimiser step; returns its line of metrics.jsonl."""
        began = time.perf_counter()
        rate = learning_rate(step, self.settings)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        scores, tokens = self.forward(entries)
        loss = combine(scores, self.settings.step_weight)
        torch.autograd.backward(loss)
        norm = torch.nn.utils.clip_grad_norm_(self.draft.parameters(), self.settings.gradient_clip)
        if not math.isfinite(float(norm)):
            keys = ", ".join(entry.key for entry in entries)
            raise OverlayError(f"step {step}: the gradient is not finite; look at the states of these records: {keys}")
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return {
            "kind": "train",
            "step": step,
            "loss": loss.item(),
            **_rates([scores]),
            "lr": rate,
            "gradient_norm": float(norm),
            "tokens": tokens,
            "seconds": time.perf_counter() - began,
        }

    def forward(self, entries: list[Entry]) -> tuple[list[StepScores], int]:
        batch = pack([self.corpus.document(entry) for entry in entries], self.settings.ttt_steps, self.device)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.settings.dtype == "bfloat16"):
            return score_steps(self.draft, self.head, batch, self.settings.ttt_steps), batch.num_tokens

    @torch.no_grad()
    def validate(self, step: int) -> dict[str, Any]:
        """The held-out records' line of metrics.jsonl: pooled over all of their rows."""
        rates = _rates([self.forward(entries)[0] for entries in self.held_out])
        loss = sum(self.settings.step_weight**step * value for step, value in enumerate(rates["loss_per_step"]))
        return {"kind": "validation", "step": step, "loss": loss, **rates}

    def keep(self, folder: RunFolder, progress: Progress) -> Progress:
        """Validate, checkpoint, draw. Without held-out records the newest is the best."""
        if self.held_out:
            line = self.validate(progress.step)
            folder.append_metrics(line)
            if progress.best_loss is None or line["loss"] < progress.best_loss:
                progress = replace(progress, best_step=progress.step, best_loss=line["loss"])
        else:
            progress = replace(progress, best_step=progress.step)
        folder.save_checkpoint(self.draft, self.optimizer, progress)
        return progress


def learning_rate(step: int, settings: Settings) -> float:
    """Linear warm-up to the peak, then a cosine to zero. `step` counts from 1."""
    assert settings.steps is not None
    warmup = max(1, round(settings.warmup * settings.steps))
    if step <= warmup:
        return settings.learning_rate * step / warmup
    return settings.learning_rate * 0.5 * (1 + math.cos(math.pi * (step - warmup) / (settings.steps - warmup + 1)))


def choose_device(name: str) -> torch.device:
    """ "auto": a GPU where there is one. Raises OverlayError: a name torch does not know, or no GPU."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name.split(":")[0] not in ("cpu", "cuda"):
        raise OverlayError(f"--device {name}: give auto, cpu, cuda or cuda:NUMBER")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise OverlayError(f"--device {name}: torch sees no GPU here; use --device cpu")
    return torch.device(name)


def _rates(batches: list[list[StepScores]]) -> dict[str, list[float]]:
    """Loss and accuracy of each test-time-training step, pooled over batches."""
    by_step = list(zip(*batches, strict=True))
    counts = [max(sum(score.count for score in scores), 1) for scores in by_step]
    return {
        "loss_per_step": [sum(s.loss.item() for s in scores) / n for scores, n in zip(by_step, counts, strict=True)],
        "accuracy": [sum(int(s.agreed) for s in scores) / n for scores, n in zip(by_step, counts, strict=True)],
    }


def _settle(
    settings: Settings, corpus: Corpus, target: Target, training: list[Entry], device: torch.device
) -> Settings:
    """Fill in what depends on the data and the machine."""
    steps = settings.steps or sum(
        len(plan_epoch(training, settings.batch_tokens, settings.seed, epoch)) for epoch in range(settings.epochs)
    )
    return replace(
        settings,
        features=corpus.feature_ids,
        draft_vocab_size=settings.draft_vocab_size or min(DEFAULT_DRAFT_VOCABULARY, target.config.vocab_size),
        hidden_size=settings.hidden_size or target.config.hidden_size,
        steps=steps,
        dtype=("bfloat16" if device.type == "cuda" else "float32") if settings.dtype == "auto" else settings.dtype,
    )


def _require_same_model(corpus: Corpus, target: Target) -> None:
    for fact in ("hidden_size", "num_hidden_layers"):
        stored, wanted = getattr(corpus.meta, fact), getattr(target.config, fact)
        if stored != wanted:
            raise OverlayError(
                f"{target.path}: {fact} is {wanted}, the store's model {corpus.meta.model} has {stored}: another model?"
            )


def _say_other_weights(say: Callable[[str], None], corpus: Corpus, target: Target) -> None:
    """Not refused: a store captured by a hub name, or brought from elsewhere, has another fingerprint for the same
    weights, and the self-test tells whether the states are this model's."""
    wanted = fingerprint_model(str(target.path), {})
    if corpus.meta.model_fingerprint != wanted:
        say(
            f"WARNING: {target.path} has the fingerprint {wanted[:12]}, the store's states come from "
            f"{corpus.meta.model} with {corpus.meta.model_fingerprint[:12]}: train on the weights that were captured"
        )


def _say_data(
    say: Callable[[str], None],
    corpus: Corpus,
    training: list[Entry],
    held_out: list[Entry],
    counted: torch.Tensor,
    vocabulary: DraftVocabulary,
) -> None:
    skipped = corpus.skipped
    say(
        f"records: {len(training)} to train on ({sum(entry.num_tokens for entry in training)} tokens), {len(held_out)} "
        f"held out; skipped {skipped.incomplete} incomplete and {skipped.unmasked} with nothing to learn; "
        f"{skipped.truncated} cut to the longest length"
    )
    covered = int(counted[vocabulary.ids].sum()) / max(int(counted.sum()), 1)
    say(f"draft vocabulary: {len(vocabulary)} of {vocabulary.vocab_size} tokens, {covered:.2%} of the text to learn")


def _run_self_test(say: Callable[[str], None], corpus: Corpus, target: Target, device: torch.device, mode: str) -> None:
    if mode == "off":
        return
    agreement = measure_agreement(corpus, target, device)
    say(agreement.describe())
    if not agreement.is_suspicious:
        return
    if mode == "strict":
        raise OverlayError(f"{agreement.describe()}, 99% expected; {CAUSES}")
    say(f"WARNING: 99% expected; {CAUSES}")


def _describe_run(
    settings: Settings, stores: Sequence[str | Path], corpus: Corpus, target: Target, draft: Draft, device: torch.device
) -> dict[str, Any]:
    """RUN/config.json. `settings` and `data` must not change on resume."""
    return {
        "settings": asdict(settings),
        "data": {
            "digest": corpus.digest(),
            "model_fingerprint": corpus.meta.model_fingerprint,
            "layers": list(corpus.stores[0].layer_ids),
        },
        "draft": asdict(draft.config),
        "target": {
            "path": str(target.path),
            "name": corpus.meta.model,
            "dtype": str(target.lm_head.dtype).removeprefix("torch."),
            "bos_token_id": target.config.bos_token_id,
            "num_hidden_layers": target.config.num_hidden_layers,
        },
        "stores": [
            {
                "path": str(path),
                "vllm_version": store.meta.vllm_version,
                "runner": store.meta.runner,
                "records": len(store),
            }
            for path, store in zip(stores, corpus.stores, strict=True)
        ],
        "made_with": {
            "vllm_overlay": _version("vllm-overlay"),
            "torch": torch.__version__,
            "python": platform.python_version(),
            "device": str(device),
        },
    }


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "not installed"


def _require_same_run(folder: RunFolder, facts: dict[str, Any]) -> None:
    found = folder.config
    wanted = json.loads(json.dumps(facts))
    for section in ("settings", "data"):
        for name, value in wanted[section].items():
            if found[section].get(name) != value:
                raise OverlayError(
                    f"{folder.path}: was made with {section} {name} = {found[section].get(name)}, not {value}; "
                    "resume with the same, or start another run"
                )


def _create_run(
    run: Path, facts: dict[str, Any], vocabulary: DraftVocabulary, trainer: Trainer
) -> tuple[RunFolder, Progress]:
    """The folder appears whole, with the untrained draft as its first checkpoint."""
    run.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{run.name}-", dir=run.parent))
    try:
        temporary.chmod(0o755)
        (temporary / "config.json").write_text(json.dumps(facts, indent=2) + "\n")
        vocabulary.save(temporary / "vocabulary.safetensors")
        (temporary / "metrics.jsonl").touch()
        progress = trainer.keep(RunFolder(temporary), Progress())
        temporary.replace(run)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return RunFolder(run), progress


def _summarise(folder: RunFolder) -> Result:
    lines = folder.metrics
    train_lines = [line for line in lines if line["kind"] == "train"]
    held_out = [line for line in lines if line["kind"] == "validation"]
    return Result(
        run=folder.path,
        steps=len(train_lines),
        tokens=sum(line["tokens"] for line in train_lines),
        first_loss=train_lines[0]["loss_per_step"][0],
        last_loss=train_lines[-1]["loss_per_step"][0],
        held_out_accuracy=tuple(held_out[-1]["accuracy"]) if held_out else None,
    )
