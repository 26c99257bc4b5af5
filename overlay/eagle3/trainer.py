"""The loop of a run: steps of AdamW with test-time training, checkpoints between. The host waits for the device only
where it must: for a batch that is still being read, and at a checkpoint."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate, islice
from operator import mul
from typing import Any, TypeVar

import torch
import torch._inductor

from vllm_overlay.eagle3.batch import Batch, pack
from vllm_overlay.eagle3.clock import Moment
from vllm_overlay.eagle3.data import Entry, count_scored, deal, plan_batches
from vllm_overlay.eagle3.draft import Draft
from vllm_overlay.eagle3.epochs import Planned, Source
from vllm_overlay.eagle3.loss import Objective, Scores, TargetHead, as_it_is
from vllm_overlay.eagle3.ranks import Ranks, whole
from vllm_overlay.eagle3.run_folder import Progress, RunFolder, Snapshot, optimizer_tensors
from vllm_overlay.eagle3.settings import Settings, learning_rate
from vllm_overlay.eagle3.target import Target
from vllm_overlay.eagle3.vocabulary import DraftVocabulary
from vllm_overlay.errors import OverlayError
from vllm_overlay.progress import make_bar

BETAS = (0.9, 0.95)
Item = TypeVar("Item")


@dataclass(frozen=True)
class Share:
    """A rank's part of a global batch. Where there are fewer records than ranks, it computes the first record again,
    because every rank takes part in every exchange, and nothing of it counts."""

    entries: list[Entry]  # of the whole global batch
    counts: list[int]  # rows scored at each step, in the whole global batch
    weights: torch.Tensor  # [steps], of each step's sum, on the device
    batch: Batch
    counted: bool


@dataclass(frozen=True)
class Taken:
    """A step whose figures may still be on their way from the device."""

    step: int
    entries: list[Entry]
    counts: list[int]
    rate: float
    figures: torch.Tensor  # float64 [1 + 3 * steps] on the CPU: the gradient's norm, then `Trainer.sums`
    end: Moment


class Trainer:
    """The loop and what it needs on the device; the same calls in the same order on every rank."""

    def __init__(
        self,
        draft: Draft,
        target: Target,
        vocabulary: DraftVocabulary,
        source: Source,
        settings: Settings,
        ranks: Ranks,
    ) -> None:
        self.draft, self.source, self.settings, self.ranks = draft, source, settings, ranks
        self.held_out = plan_batches(source.held_out, settings.batch_tokens)
        head = TargetHead(
            target.final_norm.to(ranks.device, torch.float32),
            target.config.rms_norm_eps,
            target.lm_head[vocabulary.ids].to(ranks.device, getattr(torch, settings.dtype)),
        )
        draft.lm_head.requires_grad_(settings.train_head)
        # Batches have as many tokens and rows as they have: without `dynamic` each would be compiled for.
        prepare = as_it_is
        if settings.compile:
            prepare = functools.partial(torch.compile, dynamic=True, options=compile_options())
        self.objective = Objective(draft, head, settings.ttt_steps, prepare)
        ranks.shard(self.objective)
        self.parameters = [parameter for parameter in draft.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(
            self.parameters, lr=settings.learning_rate, betas=BETAS, weight_decay=settings.weight_decay, fused=True
        )
        self.step_weights = [settings.step_weight**step for step in range(settings.ttt_steps)]

    def run_from(self, folder: RunFolder, progress: Progress) -> None:
        """Train to the last step, or to the end of the source, with a checkpoint at every `checkpoint_every` steps and
        at the end.

        A step's figures are read once the next step is under way, so that a GPU never waits for this loop; before a
        checkpoint all are read.
        """
        total = self.settings.steps
        bar = make_bar(
            total=total, initial=progress.step, unit="step", dynamic_ncols=True, desc="train",
            disable=not self.ranks.is_first,
        )  # fmt: skip
        plan = islice(self.source.plan(progress), None if total is None else total - progress.step)
        batches = load_ahead(plan, lambda planned: self.load(planned.entries), self.ranks.device)
        try:
            self.take_steps(folder, progress, batches, bar)
        finally:
            self.source.end()
            batches.close()
            bar.close()

    def take_steps(
        self, folder: RunFolder, progress: Progress, batches: Iterable[tuple[Planned, Share]], bar: Any
    ) -> None:
        pending: Taken | None = None
        last = Moment.mark(self.ranks.device)
        for planned, share in batches:
            taken = self.take_step(progress.step + 1, share)
            progress = replace(
                progress,
                step=taken.step,
                epoch=planned.epoch,
                batch=planned.batch,
                records=planned.records,
                tokens=progress.tokens + num_tokens(share.entries),
            )
            due = progress.step % self.settings.checkpoint_every == 0 or progress.step == self.settings.steps
            for done in (pending, taken if due else None):
                if done is not None:
                    self.record(folder, done, last, bar)
                    last = done.end
            pending = None if due else taken
            if due:
                progress = self.keep(folder, progress)
                last = Moment.mark(self.ranks.device)
        if pending is not None:  # the source has ended
            self.record(folder, pending, last, bar)
            self.keep(folder, progress)

    def load(self, entries: list[Entry]) -> Share:
        """Read this rank's records of a global batch and pack them onto the device."""
        mine = deal(entries, self.ranks.size)[self.ranks.number]
        texts, corpus = mine or entries[:1], self.source.corpus
        steps, device = self.settings.ttt_steps, self.ranks.device
        counts = count_scored(entries, steps)
        weights = torch.tensor([weight / max(n, 1) for weight, n in zip(self.step_weights, counts, strict=True)])
        states = corpus.read_states(texts, pinned=device.type == "cuda")
        batch = pack(texts, states, corpus.columns, steps, device, self.settings.attention)
        return Share(entries, counts, weights.to(device), batch, bool(mine))

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
        figures = torch.cat([whole(norm).double().reshape(1), self.sums(share, scores).flatten()])
        sent = figures.to("cpu", non_blocking=True)
        return Taken(step, share.entries, share.counts, rate, sent, Moment.mark(self.ranks.device))

    def score(self, share: Share) -> Scores:
        with torch.autocast(self.ranks.device.type, torch.bfloat16, enabled=self.settings.dtype == "bfloat16"):
            return self.objective.score(share.batch, share.weights)

    def sums(self, share: Share, scores: Scores) -> torch.Tensor:
        """Cross-entropy, KL and agreements of each step, summed over the global batch: float64 [3, steps]."""
        mine = torch.stack([scores.cross_entropy, scores.kl, scores.agreed]).double()
        return self.ranks.add_up(mine * share.counted)

    def record(self, folder: RunFolder, taken: Taken, since: Moment, bar: Any) -> None:
        """Wait for a step's figures and write its line of metrics.jsonl; its time is from `since` to its end.

        Raises OverlayError: a gradient that is not finite; the weights are spoilt by then, and no checkpoint has them.
        """
        taken.end.wait()
        norm, sums = float(taken.figures[0]), taken.figures[1:].view(3, -1)
        if not math.isfinite(norm):
            keys = ", ".join(entry.key for entry in taken.entries)
            raise OverlayError(
                f"step {taken.step}: the gradient is not finite; look at the states of these records: {keys}"
            )
        figures = self.figures(sums, taken.counts)
        seconds, tokens = taken.end.since(since), num_tokens(taken.entries)
        line = {"kind": "train", "step": taken.step, **figures, "lr": taken.rate, "gradient_norm": norm}
        if self.ranks.is_first:
            memory = peak_memory(self.ranks.device)
            folder.append_metrics({**line, "tokens": tokens, "seconds": seconds, "peak_memory": memory})
        bar.set_postfix_str(
            f"loss {figures['loss']:.3f}, first {figures['accuracy'][0]:.1%}, accepts about "
            f"{estimate_acceptance(figures['accuracy']):.2f}, {tokens / seconds:.0f} tokens/s",
            refresh=False,
        )
        bar.update()

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
        for _, share in load_ahead(self.held_out, self.load, self.ranks.device):
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
        self.source.release(progress)
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


def compile_options() -> dict[str, bool]:
    """For a norm's backward pass torch has one kernel where a batch has many rows (twice as many as the draft is wide,
    and some more conditions), and two where it has fewer, and compiles the step for each case. Told not to ask, it
    always takes the one; torch 2.11 is the first that can be told."""
    name = "triton.mix_order_reduction_non_strict_mode"
    return {name: True} if name in torch._inductor.list_options() else {}


def load_ahead(
    items: Iterable[Item], load: Callable[[Item], Share], device: torch.device
) -> Generator[tuple[Item, Share], None, None]:
    """Each item and its share; the next one is taken and read in a thread while the caller works on one.

    A GPU's copies go on a stream of their own, beside the caller's work. Its memory is given back to that stream, so a
    share is kept until the caller's work on it is done.
    """
    iterator = iter(items)
    stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def load_next() -> tuple[Item, Share, Moment] | None:
        for item in iterator:
            with torch.cuda.stream(stream):  # does nothing with None
                return item, load(item), Moment.mark(device)
        return None

    with ThreadPoolExecutor(1) if stream is None else working_alone() as pool:
        coming: Future[tuple[Item, Share, Moment] | None] = pool.submit(load_next)
        used: tuple[Share, Moment] | None = None
        while (loaded := coming.result()) is not None:
            item, share, ready = loaded
            coming = pool.submit(load_next)
            ready.block(device)
            yield item, share
            if used is not None:
                used[1].wait()
            used = share, Moment.mark(device)
        if used is not None:
            used[1].wait()


@contextmanager
def working_alone() -> Iterator[ThreadPoolExecutor]:
    """One thread, without torch's others: to wake them for an operation on the numbers of a batch's tokens takes longer
    than the operation.

    For a process that computes on a GPU: torch keeps one number for all threads that have not computed yet, and these
    take over what the last one was told.
    """
    before = torch.get_num_threads()  # from here on the caller has a number of its own
    try:
        with ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            yield pool
    finally:
        torch.set_num_threads(before)  # for threads that begin later


def estimate_acceptance(accuracy: Sequence[float]) -> float:
    """Tokens that a check would give: 1, and each position's share of the checks that get that far."""
    return 1 + math.fsum(accumulate(accuracy, mul))


def peak_memory(device: torch.device) -> int | None:
    """The most bytes that tensors have taken on a GPU so far; None on a CPU, where nobody counts."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def num_tokens(entries: Iterable[Entry]) -> int:
    return sum(entry.num_tokens for entry in entries)
