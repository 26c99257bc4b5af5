"""Training a draft, top to bottom: open, choose, check, then steps of AdamW with test-time training, checkpoints
between."""

from __future__ import annotations

import json
import math
import platform
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from itertools import accumulate, islice
from operator import mul
from pathlib import Path
from typing import Any, TypeVar

import torch

from vllm_overlay.eagle3.batch import Batch, pack
from vllm_overlay.eagle3.curve import plot_curve
from vllm_overlay.eagle3.data import Corpus, Entry, count_scored, deal, open_corpus, plan_batches, plan_epoch, split
from vllm_overlay.eagle3.draft import Draft
from vllm_overlay.eagle3.initialisation import create_draft, draft_config
from vllm_overlay.eagle3.loss import Objective, Scores, TargetHead
from vllm_overlay.eagle3.ranks import Ranks, alone, whole
from vllm_overlay.eagle3.run_folder import Progress, RunFolder, Snapshot, optimizer_tensors, require_free
from vllm_overlay.eagle3.selftest import find_cause, measure_agreement
from vllm_overlay.eagle3.target import Target, load_target
from vllm_overlay.eagle3.vocabulary import DraftVocabulary, choose_vocabulary, count_tokens
from vllm_overlay.errors import OverlayError
from vllm_overlay.fingerprint import fingerprint_model
from vllm_overlay.progress import make_bar

DEFAULT_DRAFT_VOCABULARY = 32768
BETAS = (0.9, 0.95)
Item = TypeVar("Item")


@dataclass(frozen=True)
class Settings:
    """What shapes the result. A resumed run must have the same; None is filled in from the data when the run is
    made."""

    features: tuple[int, ...] | None = None
    draft_vocab_size: int | None = None
    hidden_size: int | None = None
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    init: str = "target"
    train_head: bool = True
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
    ranks: Ranks | None = None,
    self_test: str = "strict",
    resume: bool = False,
    say: Callable[[str], None] = print,
) -> Result:
    """Train a draft for `model` (a local checkpoint folder) from `stores` into the folder `run`.

    ranks: of `join_ranks`, all of which call this with the same arguments and see the same files; None is this process
    alone. self_test: "strict" (refuse), "warn" or "off". Raises OverlayError for everything a user can put right.
    """
    run, ranks = Path(run), ranks or alone()
    say = say if ranks.is_first else _say_nothing
    if resume:
        RunFolder.open(run)
    else:
        require_free(run)
    target = load_target(model)
    corpus = open_corpus(stores, settings.features, settings.max_length)
    try:
        _require_same_model(corpus, target)
        training, held_out = split(corpus.entries, settings.holdout)
        counted, present = count_tokens(
            ((entry.token_ids, entry.loss_mask) for entry in training), target.config.vocab_size
        )
        _say_other_weights(say, corpus, target)
        settings = _settle(settings, corpus, target, training, ranks.device)
        size = settings.draft_vocab_size or target.config.vocab_size
        vocabulary = choose_vocabulary(counted, present, size, target.config.special_token_ids)
        _say_data(say, corpus, training, held_out, counted, vocabulary)
        if ranks.is_first:
            _run_self_test(say, corpus, target, ranks.device, self_test)

        shape = draft_config(
            target.config,
            corpus.feature_ids,
            len(vocabulary),
            hidden_size=settings.hidden_size,
            norm_before_residual=settings.norm_before_residual,
            norm_before_fc=settings.norm_before_fc,
            fc_norm=settings.fc_norm,
            norm_output=settings.norm_output,
        )
        draft = create_draft(shape, target, vocabulary, settings.init, settings.seed).to(ranks.device)
        facts = _describe_run(settings, stores, corpus, target, draft, ranks)
        trainer = Trainer(draft, target, vocabulary, corpus, training, held_out, settings, ranks)
        folder = RunFolder(run)
        if resume:
            _require_same_run(folder, facts)
            _require_same_vocabulary(folder, vocabulary)
            progress = folder.load_checkpoint(draft, trainer.optimizer)
            say(f"resuming {run} at step {progress.step} of {settings.steps}")
            if ranks.is_first:
                folder.rewind(progress)
        elif ranks.is_first:
            progress = _create_run(run, facts, vocabulary, trainer)
        else:
            progress = trainer.keep(folder, Progress())
        ranks.wait()
        trainer.run_from(folder, progress)
        if ranks.is_first:
            plot_curve(folder.metrics, folder.path / "curve.png")
        return _summarise(folder)
    finally:
        corpus.close()


@dataclass(frozen=True)
class Share:
    """A rank's part of a global batch. Where there are fewer records than ranks, it computes the first record again,
    because every rank takes part in every exchange, and nothing of it counts."""

    entries: list[Entry]  # of the whole global batch
    counts: list[int]  # rows scored at each step, in the whole global batch
    batch: Batch
    counted: bool


@dataclass(frozen=True)
class Taken:
    """A step whose figures may still be on their way from the device."""

    step: int
    share: Share
    rate: float
    norm: torch.Tensor
    sums: torch.Tensor  # [3, steps], see `Trainer.sums`


class Trainer:
    """The loop and what it needs on the device; the same calls in the same order on every rank."""

    def __init__(
        self,
        draft: Draft,
        target: Target,
        vocabulary: DraftVocabulary,
        corpus: Corpus,
        training: list[Entry],
        held_out: list[Entry],
        settings: Settings,
        ranks: Ranks,
    ) -> None:
        self.draft, self.corpus, self.settings, self.ranks = draft, corpus, settings, ranks
        self.training = training
        self.held_out = plan_batches(held_out, settings.batch_tokens)
        head = TargetHead(
            target.final_norm.to(ranks.device, torch.float32),
            target.config.rms_norm_eps,
            target.lm_head[vocabulary.ids].to(ranks.device, torch.float32),
        )
        draft.lm_head.requires_grad_(settings.train_head)
        self.objective = Objective(draft, head, settings.ttt_steps)
        ranks.shard(self.objective)
        self.parameters = [parameter for parameter in draft.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(
            self.parameters, lr=settings.learning_rate, betas=BETAS, weight_decay=settings.weight_decay, fused=True
        )
        self.step_weights = [settings.step_weight**step for step in range(settings.ttt_steps)]

    @property
    def total_steps(self) -> int:
        assert self.settings.steps is not None
        return self.settings.steps

    def run_from(self, folder: RunFolder, progress: Progress) -> None:
        """Train to the last step, with a checkpoint at every `checkpoint_every` steps and at the end.

        A step's figures are read once the next step is under way, so that a GPU never waits for this loop; before a
        checkpoint all are read.
        """
        bar = make_bar(
            total=self.total_steps, initial=progress.step, unit="step", dynamic_ncols=True, desc="train",
            disable=not self.ranks.is_first,
        )  # fmt: skip
        pending: Taken | None = None
        clock = time.perf_counter()
        plan = islice(self.plan(progress), self.total_steps - progress.step)
        for (epoch, index, _), share in load_ahead(plan, lambda item: self.load(item[2])):
            taken = self.take_step(progress.step + 1, share)
            progress = replace(
                progress,
                step=taken.step,
                epoch=epoch,
                batch=index + 1,
                tokens=progress.tokens + _num_tokens(share.entries),
            )
            due = progress.step % self.settings.checkpoint_every == 0 or progress.step == self.total_steps
            for done in (pending, taken if due else None):
                if done is not None:
                    clock = self.record(folder, done, clock, bar)
            pending = None if due else taken
            if due:
                progress = self.keep(folder, progress)
                clock = time.perf_counter()
        bar.close()

    def plan(self, progress: Progress) -> Iterator[tuple[int, int, list[Entry]]]:
        """(epoch, number in the epoch, records of the global batch), from where `progress` stands, for ever; the same
        for any number of ranks."""
        epoch, first = progress.epoch, progress.batch
        while True:
            batches = plan_epoch(self.training, self.settings.batch_tokens, self.settings.seed, epoch)
            for index in range(first, len(batches)):
                yield epoch, index, batches[index]
            epoch, first = epoch + 1, 0

    def load(self, entries: list[Entry]) -> Share:
        """Read this rank's records of a global batch and pack them onto the device."""
        mine = deal(entries, self.ranks.size)[self.ranks.number]
        documents = [self.corpus.document(entry) for entry in mine or entries[:1]]
        steps = self.settings.ttt_steps
        return Share(entries, count_scored(entries, steps), pack(documents, steps, self.ranks.device), bool(mine))

    def take_step(self, step: int, share: Share) -> Taken:
        """One optimiser step on the mean over the global batch's scored rows, without waiting for the device."""
        rate = learning_rate(step, self.settings)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        scores = self.score(share)
        torch.autograd.backward(scores.weighted * share.counted)
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, self.settings.gradient_clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return Taken(step, share, rate, whole(norm), self.sums(share, scores))

    def score(self, share: Share) -> Scores:
        weights = [weight / max(n, 1) for weight, n in zip(self.step_weights, share.counts, strict=True)]
        with torch.autocast(self.ranks.device.type, torch.bfloat16, enabled=self.settings.dtype == "bfloat16"):
            return self.objective.score(share.batch, torch.tensor(weights, device=self.ranks.device))

    def sums(self, share: Share, scores: Scores) -> torch.Tensor:
        """Cross-entropy, KL and agreements of each step, summed over the global batch: float64 [3, steps]."""
        mine = torch.stack([scores.cross_entropy, scores.kl, scores.agreed]).double()
        return self.ranks.add_up(mine * share.counted)

    def record(self, folder: RunFolder, taken: Taken, since: float, bar: Any) -> float:
        """Wait for a step's figures and write its line of metrics.jsonl. Returns the time.

        Raises OverlayError: a gradient that is not finite; the weights are spoilt by then, and no checkpoint has them.
        """
        norm = float(taken.norm)
        if not math.isfinite(norm):
            keys = ", ".join(entry.key for entry in taken.share.entries)
            raise OverlayError(
                f"step {taken.step}: the gradient is not finite; look at the states of these records: {keys}"
            )
        figures = self.figures(taken.sums, taken.share.counts)
        now, tokens = time.perf_counter(), _num_tokens(taken.share.entries)
        line = {"kind": "train", "step": taken.step, **figures, "lr": taken.rate, "gradient_norm": norm}
        if self.ranks.is_first:
            memory = peak_memory(self.ranks.device)
            folder.append_metrics({**line, "tokens": tokens, "seconds": now - since, "peak_memory": memory})
        bar.set_postfix_str(
            f"loss {figures['loss']:.3f}, first {figures['accuracy'][0]:.1%}, accepts about "
            f"{estimate_acceptance(figures['accuracy']):.2f}, {tokens / (now - since):.0f} tokens/s",
            refresh=False,
        )
        bar.update()
        return now

    def figures(self, sums: torch.Tensor, counts: Sequence[int]) -> dict[str, Any]:
        """Means over the scored rows of each step; `loss` is what is minimised."""
        cross_entropy, kl, accuracy = (
            [value / max(n, 1) for value, n in zip(row, counts, strict=True)] for row in sums.tolist()
        )
        loss = sum(weight * value for weight, value in zip(self.step_weights, cross_entropy, strict=True))
        return {"loss": loss, "loss_per_step": cross_entropy, "kl_per_step": kl, "accuracy": accuracy}

    @torch.no_grad()
    def validate(self, step: int) -> dict[str, Any]:
        """The held-out records' line of metrics.jsonl: pooled over all of their rows."""
        sums = torch.zeros(3, self.settings.ttt_steps, dtype=torch.float64, device=self.ranks.device)
        counts = [0] * self.settings.ttt_steps
        for _, share in load_ahead(self.held_out, self.load):
            sums += self.sums(share, self.score(share))
            counts = [total + n for total, n in zip(counts, share.counts, strict=True)]
        return {"kind": "validation", "step": step, **self.figures(sums, counts)}

    def keep(self, folder: RunFolder, progress: Progress) -> Progress:
        """Validate, and write a checkpoint; nobody goes on before it is there. Without held-out records the newest is
        the best."""
        if self.held_out:
            line = self.validate(progress.step)
            if self.ranks.is_first:
                folder.append_metrics(line)
            if progress.best_loss is None or line["loss"] < progress.best_loss:
                progress = replace(progress, best_step=progress.step, best_loss=line["loss"])
        else:
            progress = replace(progress, best_step=progress.step)
        snapshot = self.snapshot(progress)
        if self.ranks.is_first:
            folder.save_checkpoint(snapshot)
        self.ranks.wait()
        return progress

    def snapshot(self, progress: Progress) -> Snapshot:
        """The state as the first rank writes it; every rank must call."""
        weights, moments = self.draft.state_dict(), optimizer_tensors(self.draft, self.optimizer)
        return Snapshot(self.put_together(weights), self.put_together(moments), progress)

    def put_together(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Whole tensors in the first rank's memory, one after another; none in the others', which drop each at once."""
        kept = {}
        for name, tensor in tensors.items():
            complete = whole(tensor)
            if self.ranks.is_first:
                kept[name] = complete.cpu()
        return kept


def load_ahead(items: Iterable[Item], load: Callable[[Item], Share]) -> Iterator[tuple[Item, Share]]:
    """Each item and its share; the next one is read in a thread while the caller works on one."""
    with ThreadPoolExecutor(1) as pool:
        coming: tuple[Item, Future[Share]] | None = None
        for item in items:
            following = item, pool.submit(load, item)
            if coming is not None:
                yield coming[0], coming[1].result()
            coming = following
        if coming is not None:
            yield coming[0], coming[1].result()


def estimate_acceptance(accuracy: Sequence[float]) -> float:
    """Tokens that a check would give: 1, and each position's share of the checks that get that far."""
    return 1 + math.fsum(accumulate(accuracy, mul))


def peak_memory(device: torch.device) -> int | None:
    """The most bytes that tensors have taken on a GPU so far; None on a CPU, where nobody counts."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def learning_rate(step: int, settings: Settings) -> float:
    """Linear warm-up to the peak, then a cosine to zero. `step` counts from 1."""
    assert settings.steps is not None
    warmup = max(1, round(settings.warmup * settings.steps))
    if step <= warmup:
        return settings.learning_rate * step / warmup
    return settings.learning_rate * 0.5 * (1 + math.cos(math.pi * (step - warmup) / (settings.steps - warmup + 1)))


def _num_tokens(entries: Iterable[Entry]) -> int:
    return sum(entry.num_tokens for entry in entries)


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


def _say_nothing(line: str) -> None:
    """What the other ranks say."""


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
        f"{skipped.truncated} cut to the longest length; "
        f"{sum(entry.first_position > 0 for entry in corpus.entries)} begin within their request (windows)"
    )
    covered = int(counted[vocabulary.ids].sum()) / max(int(counted.sum()), 1)
    say(f"draft vocabulary: {len(vocabulary)} of {vocabulary.vocab_size} tokens, {covered:.2%} of the text to learn")


def _run_self_test(say: Callable[[str], None], corpus: Corpus, target: Target, device: torch.device, mode: str) -> None:
    if mode == "off":
        return
    agreement = measure_agreement(corpus, target, device)
    say(agreement.describe())
    cause = find_cause(corpus, target, agreement, device)
    if cause is None:
        return
    if mode == "strict" and agreement.is_suspicious:
        raise OverlayError(f"{agreement.describe()}; {cause}")
    say(f"WARNING: {cause}")


def _describe_run(
    settings: Settings, stores: Sequence[str | Path], corpus: Corpus, target: Target, draft: Draft, ranks: Ranks
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
            "device": ranks.device.type,
            "ranks": ranks.size,
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
        _require_same_release(folder, found[section].keys(), wanted[section].keys())
        for name, value in wanted[section].items():
            if found[section][name] != value:
                raise OverlayError(
                    f"{folder.path}: was made with {section} {name} = {found[section][name]}, not {value}; "
                    "resume with the same, or start another run"
                )


def _require_same_release(folder: RunFolder, found: Set[str], known: Set[str]) -> None:
    """Raises OverlayError: no choice of settings makes the run the same."""
    parts = [("it does not know", known - found), ("this release does not know", found - known)]
    if differences := [f"{what} {', '.join(sorted(names))}" for what, names in parts if names]:
        raise OverlayError(
            f"{folder.path}: was made by another release of vllm-overlay ({'; '.join(differences)}); resume with that "
            "release, or start another run"
        )


def _require_same_vocabulary(folder: RunFolder, vocabulary: DraftVocabulary) -> None:
    """It is chosen anew from the data, and from the target's special tokens, which may have been edited."""
    if not torch.equal(DraftVocabulary.load(folder.path / "vocabulary.safetensors").ids, vocabulary.ids):
        raise OverlayError(
            f"{folder.path}: was made with another draft vocabulary; have the model's special tokens changed? Resume "
            "with the model folder as it was, or start another run"
        )


def _create_run(run: Path, facts: dict[str, Any], vocabulary: DraftVocabulary, trainer: Trainer) -> Progress:
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
    return progress


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
