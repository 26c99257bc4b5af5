"""The check before the first step: does the target's head, on the stored last state, say the token that came next?

Wrong layer ids, a norm applied twice or not at all, another quantisation or another text all train without a word and
serve at 0% acceptance. On text that the target wrote greedily itself the answer is 100%.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vllm_overlay.eagle3.data import Corpus
from vllm_overlay.eagle3.target import Target

EXPECTED = 0.99
MAX_POSITIONS = 2048
CAUSES = (
    "likely causes: the text is not the target's own greedy text (sampled, or written by someone else), the last state "
    "is not layer id N before the final norm, the states are of another checkpoint or quantisation, or rows are shifted"
)


@dataclass(frozen=True)
class Agreement:
    """`agreed` of `positions` next tokens were the head's first choice; `generated`: all of them written by the
    target."""

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
            f"positions ({self.rate:.1%})"
        )


def measure_agreement(
    corpus: Corpus, target: Target, device: torch.device, max_positions: int = MAX_POSITIONS
) -> Agreement:
    """Look at up to `max_positions` positions whose next token the target generated; in a store without any, at those
    under the loss mask (then no rate is expected, the text may be anybody's)."""
    generated = any(entry.num_prompt_tokens < entry.num_tokens for entry in corpus.entries)
    agreed = positions = 0
    for entry in corpus.entries:
        own = torch.arange(entry.num_tokens) >= entry.num_prompt_tokens if generated else entry.loss_mask
        before = (own[1:]).nonzero()[: max_positions - positions, 0]  # positions whose next token counts
        if len(before) == 0:
            continue
        states = corpus.document(entry).final_states[before].to(device)
        choices = target.logits(states).argmax(-1).cpu()
        agreed += int((choices == entry.token_ids[before + 1]).sum())
        positions += len(before)
        if positions >= max_positions:
            break
    return Agreement(agreed, positions, generated)
