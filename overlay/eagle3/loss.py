"""The loss of test-time training: soft cross-entropy against the target, in the draft vocabulary, at every step.

Logits are made and used in chunks, so that [targets, vocabulary] never exists for a whole batch.
"""

from __future__ import annotations

from collections.abc import Callable
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
    """The target's norm and the rows of its head that the draft vocabulary keeps, on the training device.

    norm: [target_hidden], float32 or more; head: [draft_vocab, target_hidden], in the dtype of the products.
    """

    norm: torch.Tensor
    eps: float
    head: torch.Tensor

    @torch.no_grad()
    def log_probabilities(self, final_states: torch.Tensor) -> torch.Tensor:
        """States before the final norm `[n, target_hidden]` -> float32 `[n, draft_vocab]`; the norm is applied once."""
        normed = rms_norm(widen(final_states), self.norm, self.eps)
        return widen(linear(normed.to(self.head.dtype), self.head)).log_softmax(-1)


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


def as_it_is(function: Any) -> Any:
    return function


class Objective(nn.Module):
    """The draft beside the target's head: one forward a batch, all steps in it, which is what FSDP gathers the draft
    for. prepare: what is done to each of the three functions that make up the step, such as `torch.compile`."""

    def __init__(self, draft: Draft, head: TargetHead, steps: int, prepare: Callable[[Any], Any] = as_it_is) -> None:
        super().__init__()
        self.draft = draft
        self.steps = steps
        self.draw = prepare(draw_rows)
        self.log_probabilities = prepare(head.log_probabilities)
        self.compare = prepare(compare)

    def forward(self, batch: Batch, weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The fields of `Scores`, as a tuple because FSDP looks for tensors there. weights: [steps]."""
        normed = self.draw(self.draft, batch, self.steps)
        return cast(
            tuple[torch.Tensor, ...],
            ScoreRows.apply(self.draft.lm_head.weight, weights, self, batch, *normed),  # type: ignore[no-untyped-call]
        )

    def score(self, batch: Batch, weights: torch.Tensor) -> Scores:
        return Scores(*self(batch, weights))


def draw_rows(draft: Draft, batch: Batch, steps: int) -> list[torch.Tensor]:
    """The normed outputs that are scored at each step, `[scored rows, hidden]`."""
    outputs = unroll(draft, batch, steps)
    return [draft.norm(hidden[rows]) for hidden, rows in zip(outputs, batch.scored, strict=True)]


def unroll(draft: Draft, batch: Batch, steps: int) -> list[torch.Tensor]:
    """The draft's output `[rows, hidden]` at each step: true features first, then its own output; tokens are the
    text's."""
    hidden, chain = draft.start(batch.features, batch.next_tokens, batch.positions, batch.rows, batch.sight)
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
        ctx: Any,
        lm_head: torch.Tensor,
        weights: torch.Tensor,
        objective: Objective,
        batch: Batch,
        *normed: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        """lm_head: [draft_vocab, hidden]. weights: [steps]. normed: for each step [scored rows, hidden]."""
        cross_entropy, kl, agreed = (torch.zeros_like(weights) for _ in range(3))
        learns = any(ctx.needs_input_grad[4:])
        gradients = [torch.zeros_like(rows) for rows in normed] if learns else []
        lm_head_gradient = torch.zeros_like(lm_head) if learns and ctx.needs_input_grad[0] else None
        head = lm_head.to(_product_dtype(lm_head))
        for chunk in batch.chunks:
            target = objective.log_probabilities(batch.final_states[chunk.targets])  # [chunk, draft_vocab]
            for step, mine in enumerate(chunk.rows):
                if mine.start == mine.stop:
                    continue
                rows = normed[step][mine].to(head.dtype)  # [n, hidden]
                index = batch.scored_targets[step][mine] - chunk.targets.start
                sums, pull = objective.compare(rows, head, target, index, weights[step])
                cross_entropy[step] += sums[0]
                kl[step] += sums[1]
                agreed[step] += sums[2]
                if not learns:
                    continue
                gradients[step][mine] = pull @ head
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


def compare(
    rows: torch.Tensor, head: torch.Tensor, target: torch.Tensor, index: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sums over rows `[n, hidden]` of cross-entropy, KL and agreement `[3]`, and the gradient of the first, times
    `weight`, in the rows' logits `[n, draft_vocab]`.

    head: [draft_vocab, hidden]. target: log-probabilities [targets, draft_vocab]; index: int64 [n], whose each row is.
    """
    log_p = target[index]
    p = log_p.exp()
    logits = linear(rows, head)
    log_q = widen(logits).log_softmax(-1)
    agreed = (logits.argmax(-1) == log_p.argmax(-1)).sum().to(log_q.dtype)
    sums = torch.stack([-(p * log_q).sum(), (p * (log_p - log_q)).sum(), agreed])
    return sums, ((log_q.exp() - p) * weight).to(logits.dtype)


def _product_dtype(tensor: torch.Tensor) -> torch.dtype:
    """Of matrix products with the tensor: autocast's where it is on."""
    device = tensor.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else tensor.dtype
