"""Training a draft, top to bottom: open, choose, check, make or take up the run, then the loop of `trainer`."""

from __future__ import annotations

import json
import platform
import shutil
import tempfile
from collections.abc import Callable, Sequence, Set
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from vllm_overlay.eagle3.board import Board
from vllm_overlay.eagle3.curve import plot_curve
from vllm_overlay.eagle3.data import Corpus, Entry
from vllm_overlay.eagle3.draft import Draft
from vllm_overlay.eagle3.epochs import Epochs, Source
from vllm_overlay.eagle3.flex import SMALLEST_HEAD
from vllm_overlay.eagle3.follow import FOLLOWED, Follower, Following, stopping_at_signals
from vllm_overlay.eagle3.initialisation import create_draft, draft_config
from vllm_overlay.eagle3.ranks import Ranks, alone
from vllm_overlay.eagle3.run_folder import Progress, RunFolder, require_free
from vllm_overlay.eagle3.selftest import find_cause, measure_agreement
from vllm_overlay.eagle3.settings import DEFAULT_DRAFT_VOCABULARY, Settings
from vllm_overlay.eagle3.target import Target, load_target
from vllm_overlay.eagle3.trainer import Trainer
from vllm_overlay.eagle3.vocabulary import DraftVocabulary, choose_vocabulary, count_tokens
from vllm_overlay.errors import OverlayError
from vllm_overlay.fingerprint import fingerprint_model
from vllm_overlay.store.remote import find_path


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
    tensorboard: bool = False,
    say: Callable[[str], None] = print,
) -> Result:
    """Train a draft for `model` (a local checkpoint folder) from `stores` into the folder `run`.

    ranks: of `join_ranks`, all of which call this with the same arguments and see the same files; None is this process
    alone. self_test: "strict" (refuse), "warn" or "off". tensorboard: curves for it, in RUN/tensorboard. Raises
    OverlayError for everything a user can put right.
    """
    ranks = ranks or alone()
    say = say if ranks.is_first else _say_nothing
    folder = _find_folder(Path(run), resume, tensorboard)
    target = load_target(model)
    source = Epochs.open(stores, settings)
    try:
        return _run(stores, target, folder, settings, source, ranks, self_test, resume, say)
    finally:
        source.close()


def follow(
    store: str | Path,
    model: str | Path,
    run: str | Path,
    settings: Settings,
    following: Following,
    *,
    ranks: Ranks | None = None,
    self_test: str = "strict",
    resume: bool = False,
    tensorboard: bool = False,
    say: Callable[[str], None] = print,
) -> Result:
    """As `train`, by one process, from a store that is being written: until `settings.steps`, SIGINT, SIGTERM, or a
    silence of `following.idle_seconds`. Each record is learnt from once, whatever the epochs and the holdout are."""
    ranks = ranks or alone()
    if ranks.size > 1:
        raise OverlayError(f"--follow: by one process, not {ranks.size}: ranks would see other records at other times")
    path = find_path(store)
    if not isinstance(path, Path):
        raise OverlayError(
            f"--follow: {store} is in a remote folder; a store that is written is followed on its machine"
        )
    folder = _find_folder(Path(run), resume, tensorboard)
    target = load_target(model)
    settings = replace(settings, epochs=1, holdout=0.0)
    with stopping_at_signals(say) as stop:
        source = Follower(path, settings, following, resumes=resume, stop=stop, say=say)
        try:
            return _run([store], target, folder, settings, source, ranks, self_test, resume, say)
        finally:
            source.close()


def _find_folder(run: Path, resume: bool, tensorboard: bool) -> RunFolder:
    """Raises OverlayError: a run to resume that is not there, something where a new one is to be, or no TensorBoard."""
    if resume:
        RunFolder.open(run)
    else:
        require_free(run)
    return RunFolder(run, Board(run) if tensorboard else None)


def _run(
    stores: Sequence[str | Path],
    target: Target,
    folder: RunFolder,
    settings: Settings,
    source: Source,
    ranks: Ranks,
    self_test: str,
    resume: bool,
    say: Callable[[str], None],
) -> Result:
    corpus = source.corpus
    _require_same_model(corpus, target)
    _say_other_weights(say, corpus, target)
    settings = _settle(settings, source, target, ranks.device)
    if resume and not source.training:  # what a followed store had at the start may be gone
        vocabulary = DraftVocabulary.load(folder.path / "vocabulary.safetensors")
    else:
        vocabulary = _choose_vocabulary(say, source, settings, target)
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
        style=settings.style,
    )
    draft = create_draft(shape, target, vocabulary, settings.init, settings.seed).to(ranks.device)
    facts = _describe_run(settings, stores, source, target, draft, ranks)
    trainer = Trainer(draft, target, vocabulary, source, settings, ranks)
    if resume:
        _require_same_run(folder, facts)
        _require_same_vocabulary(folder, vocabulary)
        progress = folder.load_checkpoint(draft, trainer.optimizer)
        say(f"resuming {folder.path} at step {progress.step}" + (f" of {settings.steps}" if settings.steps else ""))
        if ranks.is_first:
            folder.rewind(progress)
        source.release(progress)
    elif ranks.is_first:
        progress = _create_run(folder.path, facts, vocabulary, trainer)
    else:
        progress = trainer.keep(folder, Progress())
    ranks.wait()
    trainer.run_from(folder, progress)
    if ranks.is_first:
        plot_curve(folder.metrics, folder.path / "curve.png")
    return _summarise(folder)


def _choose_vocabulary(
    say: Callable[[str], None], source: Source, settings: Settings, target: Target
) -> DraftVocabulary:
    tokens = ((entry.token_ids, entry.loss_mask) for entry in source.training)
    counted, present = count_tokens(tokens, target.config.vocab_size)
    size = settings.draft_vocab_size or target.config.vocab_size
    vocabulary = choose_vocabulary(counted, present, size, target.config.special_token_ids)
    _say_data(say, source.corpus, source.training, source.held_out, counted, vocabulary)
    return vocabulary


def _settle(settings: Settings, source: Source, target: Target, device: torch.device) -> Settings:
    """Fill in what depends on the data and the machine. Raises OverlayError: what cannot be had on this machine."""
    dtype = ("bfloat16" if device.type == "cuda" else "float32") if settings.dtype == "auto" else settings.dtype
    attention = choose_attention(settings.attention, device, target.config.head_dim, dtype)
    compiled = settings.compile
    if compiled is None:
        compiled = device.type == "cuda" and attention == "flex"
    if compiled and (device.type != "cuda" or attention != "flex"):
        raise OverlayError(f"--compile: it needs a GPU and flex attention; here are {device.type} and {attention}")
    return replace(
        settings,
        features=source.corpus.feature_ids,
        draft_vocab_size=settings.draft_vocab_size or min(DEFAULT_DRAFT_VOCABULARY, target.config.vocab_size),
        hidden_size=settings.hidden_size or target.config.hidden_size,
        steps=settings.steps or source.count_steps(settings.epochs),
        dtype=dtype,
        attention=attention,
        compile=compiled,
    )


def choose_attention(wanted: str, device: torch.device, head_dim: int, dtype: str) -> str:
    """ "auto": flex attention where it can be and was run. Raises OverlayError: what is wanted cannot be."""
    if wanted == "auto":
        was_run = device.type == "cuda" and dtype == "bfloat16"
        return "flex" if was_run and head_dim >= SMALLEST_HEAD else "mask"
    if wanted == "flex" and device.type != "cuda":
        raise OverlayError("--attention flex: it has no backward pass on a CPU; use --attention mask")
    if wanted == "flex" and head_dim < SMALLEST_HEAD:
        raise OverlayError(
            f"--attention flex: on a GPU its heads have {SMALLEST_HEAD} dimensions or more, the target's have "
            f"{head_dim}; use --attention mask"
        )
    return wanted


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
    settings: Settings, stores: Sequence[str | Path], source: Source, target: Target, draft: Draft, ranks: Ranks
) -> dict[str, Any]:
    """RUN/config.json. `settings` and `data` must not change on resume."""
    corpus = source.corpus
    return {
        "settings": asdict(settings),
        "data": {
            "digest": source.digest,
            "model_fingerprint": corpus.meta.model_fingerprint,
            "layers": list(corpus.stores[0].layer_ids),
            # Of the rows: the digest is that of tokens and masks, which a store packed in float8 has as well.
            "dtypes": [store.meta.dtype for store in corpus.stores],
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
    was_followed, is_followed = (each["data"]["digest"].startswith(FOLLOWED) for each in (found, wanted))
    if was_followed != is_followed:
        raise OverlayError(
            f"{folder.path}: was made {'with' if was_followed else 'without'} --follow; resume it so, or start another "
            "run"
        )
    for section in ("settings", "data"):
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
    if not train_lines:
        raise OverlayError(f"{folder.path}: ended before the first step; --resume goes on with it")
    return Result(
        run=folder.path,
        steps=len(train_lines),
        tokens=sum(line["tokens"] for line in train_lines),
        first_loss=train_lines[0]["loss_per_step"][0],
        last_loss=train_lines[-1]["loss_per_step"][0],
        held_out_accuracy=tuple(held_out[-1]["accuracy"]) if held_out else None,
    )
