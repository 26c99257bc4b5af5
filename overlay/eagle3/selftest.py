"""The check before the first step: does the target's head, on the stored last state, say the token that came next?

Wrong layer ids, a norm applied twice or not at all, another quantisation or another text all train without a word and
serve at 0% acceptance. On text that the target wrote greedily itself the answer is 100%. The same positions are also
read in the ways that these mistakes would have made right.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.nn.functional import linear

from vllm_overlay.eagle3.data import Corpus, Entry
from vllm_overlay.eagle3.target import Target

EXPECTED = 0.99
MAX_POSITIONS = 2048
MARGIN = 0.05  # two standard deviations of a rate over 512 positions at its worst, which is one half
MIN_POSITIONS = 100  # fewer than these tell no reading from another
# As finfo.eps, of logits from states in float8: what e4m3 may round off a number. The first choice from SmolLM2's own
# states was tied so at 99.9% of 4,979 positions; with bfloat16's at 98.9%, too few for a store that is right.
PACKED_EPS = 2.0**-4
NEAR_TIE = 0.5  # of the first choice's probability: what rounding turns over, and sampling rarely keeps to


@dataclass(frozen=True)
class Agreement:
    """`agreed` of `positions` next tokens were the head's first choice, or tied with it in the precision that the
    engine ran in or the store holds; `generated`: all of them written by the target."""

    agreed: int
    positions: int
    generated: bool

    @property
    def rate(self) -> float:
        return self.agreed / self.positions if self.positions else 0.0

    @property
    def is_suspicious(self) -> bool:
        return self.generated and self.positions > 0 and self.rate < EXPECTED

    def describe(self) -> str:
        whose = "generated" if self.generated else "masked prompt"
        return (
            f"self-test: lm_head(norm(last state)) gives the next token at {self.agreed} of {self.positions} {whose} "
            f"positions ({self.rate:.1%}{', 99% expected' if self.is_suspicious else ''})"
        )


@dataclass(frozen=True)
class Sample:
    """Positions of one record whose next token counts: int64 [n]."""

    entry: Entry
    positions: torch.Tensor

    @property
    def next_tokens(self) -> torch.Tensor:
        return self.entry.token_ids[self.positions + 1]


def measure_agreement(
    corpus: Corpus, target: Target, device: torch.device, max_positions: int = MAX_POSITIONS
) -> Agreement:
    """Look at up to `max_positions` positions whose next token the target generated; in a store without any, at those
    under the loss mask (then no rate is expected, the text may be anybody's)."""
    generated = any(entry.num_prompt_tokens < entry.num_tokens for entry in corpus.entries)
    agreed = positions = 0
    for sample in _take_samples(corpus, generated, max_positions):
        states = corpus.document(sample.entry).final_states[sample.positions]
        logits = target.logits(states.to(device)).cpu()  # [n, vocab]
        best = logits.max(-1).values
        said = logits[torch.arange(len(logits)), sample.next_tokens]
        is_packed = corpus.stores[sample.entry.store].meta.is_packed
        rounding = (PACKED_EPS if is_packed else torch.finfo(states.dtype).eps) * best.abs()
        agreed += int((said >= best - rounding).sum())
        positions += len(sample.positions)
    return Agreement(agreed, positions, generated)


def find_cause(
    corpus: Corpus, target: Target, agreement: Agreement, device: torch.device, max_positions: int = MAX_POSITIONS // 4
) -> str | None:
    """Which of norm, rows, layer ids, quantisation and text is wrong, in one line; None where nothing is suspicious.

    Another reading of the store that fits the text better shows a mistake whoever wrote the text (a random target
    apart, whose states may say their own token); how well the right one must fit is known of generated text alone.
    """
    samples = list(_take_samples(corpus, agreement.generated, max_positions))
    if sum(len(sample.positions) for sample in samples) < MIN_POSITIONS and not agreement.is_suspicious:
        return None
    documents = [corpus.document(sample.entry) for sample in samples]
    tokens = torch.cat([sample.next_tokens for sample in samples])

    def pick(shift: int, column: int | None = None) -> torch.Tensor:
        """States `[n, hidden]` beside the positions, of the last state or of a feature."""
        parts = []
        for sample, document in zip(samples, documents, strict=True):
            states = document.final_states if column is None else document.features[:, column]
            parts.append(states[(sample.positions + shift).clamp(0, len(states) - 1)])
        return torch.cat(parts).to(device)

    logits = target.logits(pick(0))
    readings = {
        "the rows are shifted: each holds the state of the token before it": target.logits(pick(1)),
        "the rows are shifted: each holds the state of the token after it": target.logits(pick(-1)),
        "the norm is wrong: the last state is already normed, and must be from before the final norm": linear(
            pick(0).float(), target.lm_head.to(device, torch.float32)
        ),
    }
    for column, layer in enumerate(corpus.feature_ids):
        readings[f"the layer ids are wrong: what is called {layer} is the last state"] = target.logits(pick(0, column))
    rates = {cause: _rate(reading, tokens) for cause, reading in readings.items()}
    best = max(rates, key=lambda cause: rates[cause])
    if rates[best] > _rate(logits, tokens) + MARGIN:
        return f"{best} (read so, {rates[best]:.1%} agree)"
    return _explain_by_probability(logits.cpu(), tokens) if agreement.is_suspicious else None


def _explain_by_probability(logits: torch.Tensor, tokens: torch.Tensor) -> str:
    """What is left: tokens that nearly won, that were possible, or that the target would hardly say."""
    probabilities = logits.softmax(-1)
    best, choices = probabilities.max(-1)
    missed = choices != tokens
    said = probabilities[missed].gather(1, tokens[missed, None])[:, 0]
    if (said / best[missed]).median() >= NEAR_TIE:
        return (
            "the precision is another: most tokens that differ were nearly the first choice, as where the states come "
            "from another quantisation of this checkpoint"
        )
    likely = float((probabilities**2).sum(-1).mean())  # what the mean probability of sampled tokens comes to
    if float(probabilities.gather(1, tokens[:, None]).mean()) >= likely / 2:
        return (
            "the text is sampled and not greedy: its tokens are as probable as the target's own samples are; that "
            "can be trained on, with --self-test warn"
        )
    return (
        "the text or the checkpoint is another: the target would hardly say these tokens after these states; train "
        "with the weights that were captured, on text that they wrote"
    )


def _rate(logits: torch.Tensor, tokens: torch.Tensor) -> float:
    return float((logits.argmax(-1).cpu() == tokens).float().mean())


def _take_samples(corpus: Corpus, generated: bool, max_positions: int) -> Iterator[Sample]:
    taken = 0
    for entry in corpus.entries:
        own = torch.arange(entry.num_tokens) >= entry.num_prompt_tokens if generated else entry.loss_mask
        positions = own[1:].nonzero()[: max_positions - taken, 0]
        if len(positions):
            yield Sample(entry, positions)
        taken += len(positions)
        if taken >= max_positions:
            return
