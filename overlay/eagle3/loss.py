"""The loss of test-time training: soft cross-entropy against the target, in the draft vocabulary, at every step.

Logits are made and used in chunks, so that [targets, vocabulary] never exists for a whole batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from torch.nn.functional import linear

from vllm_overlay.eagle3.batch import Batch
from vllm_overlay.eagle3.draft import Draft
from vllm_overlay.eagle3.target import rms_norm, widen


@dataclass(frozen=True)
class TargetHead:
    """The target's norm and the rows of its head that the draft vocabulary keeps, on the training device, float32.

    norm: [target_hidden]; head: [draft_vocab, target_hidden].
    """

    norm: torch.Tensor
    eps: float
    head: torch.Tensor

    @torch.no_grad()
    def log_probabilities(self, final_states: torch.Tensor) -> torch.Tensor:
        """States before the final norm `[n, target_hidden]` -> float32 `[n, draft_vocab]`; the norm is applied once."""
        return widen(linear(rms_norm(final_states, self.norm, self.eps), self.head)).log_softmax(-1)


@dataclass(frozen=True)
class Scores:
    """A batch's sums over the scored rows of each step, on the device; only `weighted` has a gradient.

    weighted: scalar, the cross-entropies with each step's weight. cross_entropy, kl: [steps], nats; they differ by the
    target's entropy, a constant. agreed: [steps], rows whose argmax is the target's, both within the draft vocabulary.
    """

    weighted: torch.Tensor
    cross_entropy: torch.Tensor
    kl: torch.Tensor
    agreed: torch.Tensor


class Objective(nn.Module):
    """The draft beside the target's head: one forward a batch, all steps in it, which is what FSDP gathers the draft
    for."""

    def __init__(self, draft: Draft, head: TargetHead, steps: int) -> None:
        super().__init__()
        self.draft = draft
        self.head = head
        self.steps = steps

    def forward(self, batch: Batch, weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The fields of `Scores`, as a tuple because FSDP looks for tensors there. weights: [steps]."""
        outputs = unroll(self.draft, batch, self.steps)
        normed = [self.draft.norm(hidden[rows]) for hidden, rows in zip(outputs, batch.scored, strict=True)]
        return cast(
            tuple[torch.Tensor, ...],
            ScoreRows.apply(self.draft.lm_head.weight, weights, self.head, batch, *normed),  # type: ignore[no-untyped-call]
        )

    def score(self, batch: Batch, weights: torch.Tensor) -> Scores:
        return Scores(*self(batch, weights))


def unroll(draft: Draft, batch: Batch, steps: int) -> list[torch.Tensor]:
    """The draft's output `[rows, hidden]` at each step: true features first, then its own output; tokens are the
    text's."""
    hidden, chain = draft.start(batch.features, batch.next_tokens, batch.positions, batch.rows, batch.spans)
    outputs = [hidden]
    for step in range(1, steps):
        hidden = draft.advance(hidden, batch.row_tokens[step], batch.positions[batch.rows] + step, chain)
        outputs.append(hidden)
    return outputs


class ScoreRows(torch.autograd.Function):
    """Normed rows to `Scores`, a chunk of targets at a time; the gradients are made on the way.

    With p the target's probabilities and q the draft's, the gradient of the cross-entropy in a row's logits is q - p,
    so a chunk's logits are done with once its part of the gradients is added up: nothing of [rows, draft_vocab] is kept
    for the backward pass, and nothing computed twice. (The fused linear cross-entropy of Liger Kernel, Hsu et al. 2024,
    with soft targets.) The loss is the forward KL up to the target's entropy (EAGLE-3; TorchSpec).
    """

    @staticmethod
    def forward(
        ctx: Any, lm_head: torch.Tensor, weights: torch.Tensor, head: TargetHead, batch: Batch, *normed: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """lm_head: [draft_vocab, hidden]. weights: [steps]. normed: for each step [scored rows, hidden]."""
        cross_entropy, kl, agreed = (torch.zeros_like(weights) for _ in range(3))
        learns = any(ctx.needs_input_grad[4:])
        gradients = [torch.zeros_like(rows) for rows in normed] if learns else []
        lm_head_gradient = torch.zeros_like(lm_head) if learns and ctx.needs_input_grad[0] else None
        for chunk in batch.chunks:
            target = head.log_probabilities(batch.final_states[chunk.targets])  # [chunk, draft_vocab]
            choices = target.argmax(-1)
            for step, mine in enumerate(chunk.rows):
                rows = normed[step][mine]  # [n, hidden]
                index = batch.scored_targets[step][mine] - chunk.targets.start
                log_p = target[index]  # [n, draft_vocab]
                p = log_p.exp()
                logits = linear(rows, lm_head)
                log_q = widen(logits).log_softmax(-1)
                cross_entropy[step] -= (p * log_q).sum()
                kl[step] += (p * (log_p - log_q)).sum()
                agreed[step] += (logits.argmax(-1) == choices[index]).sum()
                if not learns:
                    continue
                pull = ((log_q.exp() - p) * weights[step]).to(logits.dtype)
                gradients[step][mine] = pull @ lm_head
                if lm_head_gradient is not None:
                    lm_head_gradient += pull.T @ rows
        ctx.save_for_backward(lm_head_gradient, *gradients)
        ctx.mark_non_differentiable(cross_entropy, kl, agreed)
        return (weights * cross_entropy).sum(), cross_entropy, kl, agreed

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, *_: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        lm_head_gradient, *gradients = ctx.saved_tensors
        scaled = None if lm_head_gradient is None else lm_head_gradient * gradient
        return scaled, None, None, None, *(part * gradient for part in gradients)
