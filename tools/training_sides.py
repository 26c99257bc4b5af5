"""The sides of tools/compare_training.py, which runs `python tools/training_sides.py SIDE WORK RESULT SECONDS`.

Ours is `Trainer` without checkpoints. speculators is the command `speculators train`, whose trainer is told which
batches to take and is timed; its code is as installed. SpecForge's command starts SGLang, so that its parts are called
here: its collation, model, loss and optimiser.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from itertools import count, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from vllm_overlay.eagle3.clock import Moment
from vllm_overlay.eagle3.data import Corpus, Entry, open_corpus, plan_epoch
from vllm_overlay.eagle3.draft import Draft, DraftConfig
from vllm_overlay.eagle3.epochs import Epochs
from vllm_overlay.eagle3.export import vllm_config
from vllm_overlay.eagle3.initialisation import create_draft, draft_config
from vllm_overlay.eagle3.ranks import alone
from vllm_overlay.eagle3.settings import Settings
from vllm_overlay.eagle3.speculators_format import convert_to_speculators
from vllm_overlay.eagle3.target import Target, load_target, rms_norm, widen
from vllm_overlay.eagle3.trainer import Trainer, load_ahead, num_tokens
from vllm_overlay.eagle3.training import choose_attention
from vllm_overlay.eagle3.vocabulary import DraftVocabulary, choose_vocabulary, count_tokens
from vllm_overlay.errors import OverlayError

MIB = 1 << 20
TTT_STEPS = 3
BETAS = (0.9, 0.999)  # of speculators' AdamW, which has no option for them
NEVER = 10**9  # steps between speculators' log lines, at each of which it waits for the GPU
# Of `speculators train`: on a CPU its flex attention has no backward pass, and its fused losses have no Triton.
CPU_FLAGS = ("--draft-attn-impl", "eager", "--loss-implementation", "eager", "--hidden-states-dtype", "float32")
OURS = {"ours": ("mask", False), "ours-flex": ("flex", False), "ours-compiled": ("flex", True)}
KNOWN_SIDES = (*OURS, "speculators", "specforge")
DATA, DRAFT = "speculators_data", "draft"  # folders in the work folder


@dataclass(frozen=True)
class Work:
    """What all sides are asked to do."""

    model: str
    store: str
    batch_tokens: int
    steps: int
    warm_up: int
    learning_rate: float
    draft_vocab_size: int
    workers: int

    def settings(self, attention: str, compile: bool) -> Settings:
        """`steps` None and no warm-up: the learning rate is the same at every step."""
        return Settings(
            draft_vocab_size=self.draft_vocab_size, train_head=False, ttt_steps=TTT_STEPS, step_weight=1.0, steps=None,
            learning_rate=self.learning_rate, warmup=0.0, batch_tokens=self.batch_tokens, holdout=0.0,
            dtype="bfloat16" if torch.cuda.is_available() else "float32", attention=attention, compile=compile,
        )  # fmt: skip


class Enough(Exception):
    """The side's time is over."""


@dataclass
class StepClock:
    """Ends of steps. `limit`: seconds after which `tick` raises Enough."""

    device: torch.device
    warm_up: int
    limit: float
    began: float = field(default_factory=time.monotonic)
    moments: list[Moment] = field(default_factory=list)
    warm_up_peak: int | None = None

    def tick(self) -> None:
        """A step was given to the device. The first call is the start of the first step."""
        self.moments.append(Moment.mark(self.device))
        if len(self.moments) == self.warm_up + 1 and self.device.type == "cuda":
            self.moments[-1].wait()
            self.warm_up_peak = torch.cuda.max_memory_allocated()
            torch.cuda.reset_peak_memory_stats()
        if time.monotonic() - self.began > self.limit:
            raise Enough

    def figures(self) -> dict[str, Any]:
        """Seconds of each step, and the peaks in bytes, None where nobody counts them."""
        self.moments[-1].wait()
        pairs = zip(self.moments[:-1], self.moments[1:], strict=True)
        peak = torch.cuda.max_memory_allocated() if self.device.type == "cuda" else None
        return {
            "seconds": [round(end.since(start), 5) for start, end in pairs],
            "peak_memory_bytes": peak,
            "peak_memory_of_all_bytes": None if peak is None else max(peak, self.warm_up_peak or 0),
        }


def prepare(work: Work, folder: Path, *, for_speculators: bool) -> None:
    """Write into the work folder what the sides read: the batches and, for speculators, its data and the first draft.

    Raises OverlayError: a store that cannot be trained on, or that the sides would not read alike.
    """
    corpus = open_corpus([work.store])
    try:
        refuse_cut_records(corpus, work.store)
        batches = plan(corpus, work)
        content = {"work": asdict(work), "batches": [[entry.index for entry in batch] for batch in batches]}
        (folder / "work.json").write_text(json.dumps(content))
        if for_speculators:
            target = load_target(work.model)
            vocabulary = find_vocabulary(corpus, target, work.draft_vocab_size)
            write_draft(folder / DRAFT, make_draft(corpus, target, vocabulary), target, vocabulary, work)
            write_data(corpus, vocabulary, folder / DATA)
    finally:
        corpus.close()


def refuse_cut_records(corpus: Corpus, store: str) -> None:
    if corpus.skipped.truncated:
        raise OverlayError(
            f"{store}: {corpus.skipped.truncated} records are longer than 4096 tokens, and the sides would not cut "
            "them alike"
        )


def plan(corpus: Corpus, work: Work) -> list[list[Entry]]:
    """The batches of all steps. The last record is left for speculators' validation, which cannot be without one."""
    last = list_places(corpus)[-1]
    entries = [entry for entry in corpus.entries if entry.first_position == 0 and entry.index != last]
    if not entries:
        raise OverlayError(f"{work.store}: has no two records that begin at the start of their requests")
    epochs = (plan_epoch(entries, work.batch_tokens, 0, epoch) for epoch in count())
    return list(islice((batch for epoch in epochs for batch in epoch), work.steps))


def list_places(corpus: Corpus) -> list[int]:
    """The records that `convert --to speculators` writes, in its order."""
    store = corpus.stores[0]
    return [number for number in store.complete_numbers() if store[number].first_position == 0]


def find_vocabulary(corpus: Corpus, target: Target, size: int) -> DraftVocabulary:
    tokens = ((entry.token_ids, entry.loss_mask) for entry in corpus.entries)
    counted, present = count_tokens(tokens, target.config.vocab_size)
    return choose_vocabulary(counted, present, size, target.config.special_token_ids)


def make_draft(corpus: Corpus, target: Target, vocabulary: DraftVocabulary, *, norms: bool = False) -> Draft:
    """The same weights in every process: made on the CPU from one seed. norms: those of speculators' own drafts."""
    shape = draft_config(
        target.config, corpus.feature_ids, len(vocabulary),
        norm_before_residual=norms, norm_before_fc=norms, norm_output=norms,
    )  # fmt: skip
    return create_draft(shape, target, vocabulary, "target", 0)


def write_draft(folder: Path, draft: Draft, target: Target, vocabulary: DraftVocabulary, work: Work) -> None:
    """The first draft as speculators loads it (--from-pretrained), in float32 as it would make its own."""
    facts = describe_draft(draft.config, target, work.model)
    # Without embeddings speculators 0.9.0 trains on memory that nobody has written (it looks for NaN, which it is not).
    tensors = {**draft.state_dict(), "embed_tokens.weight": target.embed_tokens}
    if not vocabulary.is_full:
        tensors |= {"d2t": vocabulary.d2t, "t2d": vocabulary.t2d}
    config, tensors = convert_to_speculators(vllm_config(facts, "float32", step=0), tensors, facts)
    write_checkpoint(folder, config, tensors)


def write_checkpoint(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    folder.mkdir()
    save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def describe_draft(draft: DraftConfig, target: Target, model: str, fingerprint: str = "") -> dict[str, Any]:
    """What an export wants to know of a run. `fingerprint`: of the model whose states it learnt from."""
    return {
        "draft": asdict(draft),
        "target": {
            "name": model,
            "path": model,
            "bos_token_id": target.config.bos_token_id,
            "num_hidden_layers": target.config.num_hidden_layers,
        },
        "settings": {"ttt_steps": TTT_STEPS},
        "data": {"model_fingerprint": fingerprint},
        "made_with": {},
    }


def write_data(corpus: Corpus, vocabulary: DraftVocabulary, folder: Path) -> None:
    """The store as speculators' data set, with the vocabulary's maps where it looks for them."""
    from vllm_overlay.cli.convert import show_progress
    from vllm_overlay.store.record_files import RESIDUAL, write_record_files

    store = corpus.stores[0]
    if set(store.layer_ids) != {*corpus.feature_ids, store.meta.num_hidden_layers}:
        raise OverlayError(
            f"{store.path}: holds layers {list(store.layer_ids)}, and speculators takes all of them for "
            f"features but the last: subset the store to {list(corpus.feature_ids)} and the last state"
        )
    write_record_files(store, folder, "speculators", RESIDUAL, show_progress)
    np.save(folder / f"d2t-{len(vocabulary)}.npy", vocabulary.d2t.numpy())
    np.save(folder / f"t2d-{len(vocabulary)}.npy", vocabulary.t2d.numpy())


def train_ours(work: Work, batches: Sequence[Sequence[int]], folder: Path, side: str, limit: float) -> dict[str, Any]:
    attention, compiled = OURS[side]
    settings, ranks = work.settings(attention, compiled), alone()
    target, source = load_target(work.model), Epochs.open([work.store], settings)
    choose_attention(attention, ranks.device, target.config.head_dim, settings.dtype)
    vocabulary = find_vocabulary(source.corpus, target, work.draft_vocab_size)
    draft = make_draft(source.corpus, target, vocabulary).to(ranks.device)
    trainer = Trainer(draft, target, vocabulary, source, settings, ranks)
    for group in trainer.optimizer.param_groups:
        group["betas"] = BETAS
    entries = {entry.index: entry for entry in source.corpus.entries}
    items: Iterator[list[Entry]] = ([entries[number] for number in batch] for batch in batches)
    loaded = load_ahead(items, trainer.load, ranks.device)
    clock, taken = StepClock(ranks.device, work.warm_up, limit), []
    try:
        clock.tick()
        for number, (_, share) in enumerate(loaded, 1):
            taken.append(trainer.take_step(number, share))
            clock.tick()
    except Enough:
        pass
    finally:
        loaded.close()
    figures = clock.figures()
    lines = [trainer.figures(each.figures[1:].view(3, -1), each.counts)["kl_per_step"] for each in taken]
    return {
        **figures,
        "tokens": [num_tokens(each.entries) for each in taken],
        "losses": [round(sum(line), 5) for line in lines],
        "loss_per_step": [[round(value, 5) for value in line] for line in lines],
        "settings": {**asdict(settings), "version": version("vllm-overlay")},
    }


def speculators_flags(work: Work, folder: Path, records: int, on_gpu: bool) -> list[str]:
    """The options of `speculators train`."""
    return [
        "--verifier-name-or-path", work.model, "--data-path", str(folder / DATA), "--save-path", str(folder / "theirs"),
        "--from-pretrained", str(folder / DRAFT), "--draft-vocab-size", str(work.draft_vocab_size),
        "--total-seq-len", str(work.batch_tokens), "--train-data-ratio", str((records - 0.5) / records),
        "--on-missing", "raise", "--num-workers", str(work.workers),
        "--loss-fn", "kl_div", "--ttt-steps", str(TTT_STEPS), "--ttt-step-loss-decay", "1.0",
        "--optimizer", "adamw", "--lr", str(work.learning_rate), "--weight-decay", "0.0", "--scheduler-type", "none",
        "--epochs", "1", "--log-freq", str(NEVER), "--no-resume-from-checkpoint", *([] if on_gpu else CPU_FLAGS),
    ]  # fmt: skip


def train_speculators(
    work: Work, batches: Sequence[Sequence[int]], folder: Path, side: str, limit: float
) -> dict[str, Any]:
    corpus = open_corpus([work.store])
    lengths = {entry.index: entry.num_tokens for entry in corpus.entries}
    place = {number: place for place, number in enumerate(list_places(corpus))}
    corpus.close()
    device = alone().device
    clock = StepClock(device, work.warm_up, limit)
    seen: list[list[torch.Tensor]] = []
    found: dict[str, Any] = {}

    def note(module: Any, args: Any, output: Any) -> None:
        """Its loss, and the parts of it; still on the device."""
        _, loss, parts = output
        seen.append([loss.detach(), *(parts[f"loss_{step}_sum"].detach() for step in range(TTT_STEPS))])

    def run_training(trainer: Any) -> None:
        """One epoch that has the batches of all steps; nothing is validated or saved."""
        mine = [np.array([place[number] for number in batch]) for batch in batches]
        trainer.train_loader.batch_sampler._cached_generated_batches = (0, mine)
        trainer.model.register_forward_hook(note)
        found["dtypes"] = sorted({str(parameter.dtype) for parameter in trainer.model.parameters()})
        found["trained"] = sum(one.numel() for one in trainer.model.parameters() if one.requires_grad)
        try:
            clock.tick()
            trainer.train_epoch(0, step_callback=clock.tick)
        except Enough:
            pass

    flags = speculators_flags(work, folder, len(place), device.type == "cuda")
    run_speculators(flags, device, run_training)
    figures = clock.figures()
    done = len(figures["seconds"])
    values = [[float(value) for value in step] for step in seen[:done]]
    return {
        **figures,
        "tokens": [sum(lengths[number] for number in batch) for batch in batches[:done]],
        "losses": [round(step[0], 5) for step in values],
        "loss_per_step": [[round(value, 5) for value in step[1:]] for step in values],
        "settings": {"flags": flags, **found, "version": version("speculators"), "compiled": device.type == "cuda"},
    }


def run_speculators(flags: Sequence[str], device: torch.device, run_training: Callable[[Any], None]) -> None:
    """`speculators train` with `run_training(trainer)` in place of its trainer's own."""
    from speculators.train import cli, trainer
    from speculators.train.config import TrainConfig

    if device.type == "cuda":
        part_tile_lists()
    else:  # its trainer knows accelerators by number, and has no word for a CPU
        trainer.get_local_rank = lambda: "cpu"

    class Told(trainer.Trainer):  # type: ignore[misc]
        def run_training(self) -> None:
            self.global_step = 1  # it logs at multiples of --log-freq, and waits for a GPU there
            run_training(self)

    cli.Trainer = Told
    cli.main(TrainConfig.resolve(list(flags)))


def part_tile_lists() -> None:
    """Give each of speculators' fused loss kernels a list of tiles of its own.

    Both are made with one list, which torch 2.11 refuses to compile ("ListVariable is already tracked for mutation",
    seen on an H200), and it ends. The tiles stay the same.
    """
    from speculators.losses import fused

    fused.loss_backward_kernel.configs = list(fused.loss_backward_kernel.configs)


def train_specforge(
    work: Work, batches: Sequence[Sequence[int]], folder: Path, side: str, limit: float
) -> dict[str, Any]:
    """On a CPU its attention is sdpa, and its loss, a Triton kernel, needs TRITON_INTERPRET=1."""
    from specforge.algorithms.eagle3.data import build_offline_collator, normalize_offline_sample
    from specforge.algorithms.eagle3.model import OnlineEagle3Model
    from specforge.modeling.draft import LlamaForCausalLMEagle3
    from specforge.modeling.target.target_head import TargetHead
    from specforge.optimizer import BF16Optimizer
    from specforge.runtime.contracts import TrainBatch
    from specforge.training.strategies.base import Eagle3TrainStrategy
    from transformers import LlamaConfig

    device, corpus, target = alone().device, open_corpus([work.store]), load_target(work.model)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    attention = "flex_attention" if device.type == "cuda" else "sdpa"
    vocabulary = find_vocabulary(corpus, target, work.draft_vocab_size)
    draft = make_draft(corpus, target, vocabulary)
    config = LlamaConfig.from_dict(vllm_config(describe_draft(draft.config, target, work.model), "float32", step=0))
    theirs = LlamaForCausalLMEagle3(config, attention_backend=attention)
    maps = {"t2d": vocabulary.t2d, "d2t": vocabulary.d2t, "embed_tokens.weight": target.embed_tokens}
    theirs.load_state_dict({**draft.state_dict(), **maps})
    theirs.to(device, dtype)
    theirs.embed_tokens.requires_grad_(False)
    theirs.lm_head.requires_grad_(False)
    head = TargetHead(work.model)
    head.fc.weight = torch.nn.Parameter(target.lm_head.to(device, dtype), requires_grad=False)
    model = OnlineEagle3Model(theirs, length=TTT_STEPS, attention_backend=attention)
    strategy = Eagle3TrainStrategy(model, target_head=head, ploss_decay=1.0)
    optimizer = BF16Optimizer(
        theirs, work.learning_rate, max_grad_norm=1.0, total_steps=work.steps + 1, warmup_ratio=0.0,
        lr_scheduler="constant",
    )  # fmt: skip
    entries = {entry.index: entry for entry in corpus.entries}
    collate, norm = build_offline_collator(), target.final_norm.to(device, torch.float32)

    def read(entry: Entry) -> Any:
        """As its files hold a record: the last state after the final norm."""
        document = corpus.document(entry)
        final = widen(document.final_states.to(device))
        return normalize_offline_sample(
            {
                "aux_hidden_state": document.features.flatten(1)[None].to(device, dtype),
                "hidden_state": rms_norm(final, norm, target.config.rms_norm_eps).to(dtype)[None],
                "input_ids": entry.token_ids.to(device),
                "loss_mask": entry.loss_mask.long().to(device),
            },
            max_len=work.batch_tokens,
        )

    def load(numbers: Sequence[int]) -> Any:
        tensors = collate([read(entries[number]) for number in numbers])
        return TrainBatch([], "eagle3", tensors, {"target_repr": "hidden_state"})

    clock, seen = StepClock(device, work.warm_up, limit), []
    loaded = load_ahead(batches, load, device)
    try:
        clock.tick()
        for _, batch in loaded:
            output = strategy.forward_loss(batch)
            output.loss.backward()
            optimizer.step()
            seen.append(output.metrics["plosses"])
            clock.tick()
    except Enough:
        pass
    finally:
        loaded.close()
    return {
        **clock.figures(),
        "tokens": [sum(entries[number].num_tokens for number in batch) for batch in batches[: len(seen)]],
        "losses": None,
        "losses_of_its_own_kind": [[round(float(value), 5) for value in step] for step in seen],
        "settings": {"attention": attention, "dtype": str(dtype), "version": version("specforge")},
    }


def version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "not installed"


def main() -> int:
    side, folder, result, limit = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), float(sys.argv[4])
    content = json.loads((folder / "work.json").read_text())
    os.environ["HF_HUB_OFFLINE"] = "1"
    train = {"speculators": train_speculators, "specforge": train_specforge}.get(side, train_ours)
    try:
        figures = train(Work(**content["work"]), content["batches"], folder, side, limit)
    except OverlayError as error:
        print(error, file=sys.stderr)
        return 1
    result.write_text(json.dumps(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
