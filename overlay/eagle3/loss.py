"""The loss of test-time training: soft cross-entropy against the target, in the draft vocabulary, at every step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import cross_entropy

from vllm_overlay.eagle3.batch import Batch
from vllm_overlay.eagle3.draft import Draft
from vllm_overlay.eagle3.target import rms_norm


@dataclass(frozen=True)
class TargetHead:
    """The target's norm and the rows of its head that the draft vocabulary keeps, on the training device, float32.

    norm: [target_hidden]; head: [draft_vocab, target_hidden].
    """

    norm: torch.Tensor
    eps: float
    head: torch.Tensor

    @torch.no_grad()
    def probabilities(self, final_states: torch.Tensor) -> torch.Tensor:
        """States before the final norm `[n, target_hidden]` -> float32 `[n, draft_vocab]`; the norm is applied once."""
        logits = torch.nn.functional.linear(rms_norm(final_states, self.norm, self.eps), self.head)
        return logits.softmax(-1, dtype=torch.float32)


@dataclass(frozen=True)
class StepScores:
    """One step of test-time training over a batch: sums over the scored rows, still on the device."""

    loss: torch.Tensor  # scalar, nats
    agreed: torch.Tensor  # int64 scalar: rows whose argmax is the target's, both within the draft vocabulary
    count: int


def unroll(draft: Draft, batch: Batch, steps: int) -> list[torch.Tensor]:
    """The draft's output `[rows, hidden]` at each step: true features first, then its own output; tokens are the
    text's."""
    hidden, chain = draft.start(batch.features, batch.next_tokens, batch.positions, batch.rows, batch.spans)
    outputs = [hidden]
    for step in range(1, steps):
        hidden = draft.advance(hidden, batch.row_tokens[step], batch.positions[batch.rows] + step, chain)
        outputs.append(hidden)
    return outputs


def score_steps(draft: Draft, head: TargetHead, batch: Batch, steps: int) -> list[StepScores]:
    """Forward of all steps. The loss is the forward KL up to the target's entropy, a constant (EAGLE-3; TorchSpec)."""
    probabilities = head.probabilities(batch.final_states)  # [targets, draft_vocab]
    choices = probabilities.argmax(-1)
    scores = []
    for step, hidden in enumerate(unroll(draft, batch, steps)):
        logits = draft.logits(hidden[batch.scored[step]]).float()  # [scored, draft_vocab]
        index = batch.scored_targets[step]
        loss = cross_entropy(logits, probabilities[index], reduction="sum")
        agreed = (logits.detach().argmax(-1) == choices[index]).sum()
        scores.append(StepScores(loss, agreed, len(index)))
    return scores


def combine(scores: list[StepScores], step_weight: float) -> torch.Tensor:
    """The scalar to minimise: the mean over each step's scored rows, weighted by step_weight ** step. Zero without
    rows."""
    weighted = [step_weight**step * score.loss / max(score.count, 1) for step, score in enumerate(scores)]
    return torch.stack(weighted).sum()
