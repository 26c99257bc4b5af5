"""How much of a draft the target accepts: a greedy chain in torch over captured states, with no engine.

For every position the draft continues as it would when served (true features up to there, then its own output and its
own tokens); then the text is walked as vLLM does: check k tokens, accept the matching start, go on after the target's
own next token.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file

from vllm_overlay.eagle3.attention import make_spans
from vllm_overlay.eagle3.draft import Draft
from vllm_overlay.eagle3.export import ARCHITECTURES, read_draft_config
from vllm_overlay.errors import OverlayError


@dataclass(frozen=True)
class Acceptance:
    """Pooled counts, as vLLM's counters name them.

    num_drafts: checks. num_draft_tokens: proposed, k a check. accepted_per_position: how often the token at each draft
    position was accepted (which needs all before it). head_is_zero: the draft's head cannot prefer any token.
    """

    num_drafts: int
    num_draft_tokens: int
    accepted_per_position: tuple[int, ...]
    head_is_zero: bool = False

    @property
    def num_accepted(self) -> int:
        return sum(self.accepted_per_position)

    @property
    def acceptance_length(self) -> float:
        """Tokens a check gives: 1 + accepted / checks. 1.0 without any check."""
        return 1 + self.num_accepted / self.num_drafts if self.num_drafts else 1.0

    @property
    def rates(self) -> tuple[float, ...]:
        """Accepted at each position, over checks."""
        return tuple(accepted / max(self.num_drafts, 1) for accepted in self.accepted_per_position)

    @property
    def problem(self) -> str | None:
        """Why this draft is dead, in one line; None for one that is alive."""
        if self.head_is_zero:
            return (
                "the draft's lm_head is all zeros: it proposes the same token everywhere; export it again or train it"
            )
        if self.num_drafts and not self.accepted_per_position[0]:
            return (
                f"no draft token was accepted in {self.num_drafts} checks: wrong layer ids, a wrong vocabulary map, "
                "or a draft of another model"
            )
        return None


def pool(parts: Iterable[Acceptance]) -> Acceptance:
    """Add the counts of several texts, so that long ones weigh more; never a mean of ratios."""
    parts = list(parts)
    per_position = zip(*(part.accepted_per_position for part in parts), strict=True)
    return Acceptance(
        sum(part.num_drafts for part in parts),
        sum(part.num_draft_tokens for part in parts),
        tuple(sum(counts) for counts in per_position),
        any(part.head_is_zero for part in parts),
    )


@dataclass(frozen=True)
class LoadedDraft:
    """An exported draft, ready to run. target_ids: int64 [draft_vocab], the target's id of each draft token."""

    draft: Draft
    target_ids: torch.Tensor


def load_draft(folder: str | Path, target_embeddings: torch.Tensor, device: str | torch.device = "cpu") -> LoadedDraft:
    """Load an exported draft in float32. target_embeddings: [vocab, hidden], used where the file has none.

    Raises OverlayError: not a draft of ours, or one for another target.
    """
    folder = Path(folder)
    if not (folder / "config.json").is_file() or not (folder / "model.safetensors").is_file():
        raise OverlayError(f"{folder}: no exported draft here (config.json and model.safetensors)")
    config = json.loads((folder / "config.json").read_text())
    if config.get("architectures") not in [[name] for name in ARCHITECTURES.values()]:
        known = " and ".join(ARCHITECTURES.values())
        raise OverlayError(f"{folder}: architectures {config.get('architectures')}, only {known} can be measured")
    shape = read_draft_config(config)
    if len(target_embeddings) != shape.vocab_size:
        raise OverlayError(
            f"{folder}: made for a vocabulary of {shape.vocab_size}, the model has {len(target_embeddings)}"
        )
    tensors = load_file(str(folder / "model.safetensors"))
    target_ids = torch.arange(shape.draft_vocab_size) + tensors.pop("d2t", torch.tensor(0))
    tensors.pop("t2d", None)
    draft = Draft(shape, None if shape.has_own_embeddings else target_embeddings.float())
    draft.load_state_dict({name: tensor.float() for name, tensor in tensors.items()})
    return LoadedDraft(draft.to(device), target_ids.to(device))


@torch.no_grad()
def draft_chains(loaded: LoadedDraft, features: torch.Tensor, token_ids: torch.Tensor, k: int) -> torch.Tensor:
    """Proposals int64 `[T - 1, k]`, in the target's ids: row p has seen the features up to p and the token at p+1.

    features: [T, 3, target_hidden]; token_ids: int64 [T]. Entry [p, j] is a proposal for position p+2+j.
    """
    draft, device = loaded.draft, loaded.target_ids.device
    features, token_ids = features.to(device, torch.float32), token_ids.to(device)
    rows = torch.arange(len(token_ids) - 1)
    positions = torch.arange(len(token_ids), device=device)
    rows_here = rows.to(device)
    hidden, chain = draft.start(features, token_ids.roll(-1), positions, rows_here, make_spans(rows, [0]))
    proposals = [loaded.target_ids[draft.logits(hidden).argmax(-1)]]
    for step in range(1, k):
        hidden = draft.advance(hidden, proposals[-1], rows_here + step, chain)
        proposals.append(loaded.target_ids[draft.logits(hidden).argmax(-1)])
    return torch.stack(proposals, dim=1).cpu()


def measure_acceptance(
    loaded: LoadedDraft, features: torch.Tensor, token_ids: torch.Tensor, num_prompt_tokens: int, k: int
) -> Acceptance:
    """Walk one text of the target (its own greedy text) with drafts of `k` tokens.

    features: [T, 3, target_hidden] of the draft's layer ids; token_ids: int64 [T]; the first check comes after the
    first generated token. Only checks whose k tokens lie inside the text are counted: beyond its end nobody knows
    what the target would say.
    """
    head_is_zero = not bool(loaded.draft.lm_head.weight.any())
    matches = _matches(draft_chains(loaded, features, token_ids, k), token_ids.cpu(), k)
    accepted = [0] * k
    checks = 0
    row = max(num_prompt_tokens, 1) - 1
    while row < len(matches):
        length = int(matches[row])
        for position in range(length):
            accepted[position] += 1
        checks += 1
        row += length + 1
    return Acceptance(checks, checks * k, tuple(accepted), head_is_zero)


def _matches(proposals: torch.Tensor, token_ids: torch.Tensor, k: int) -> torch.Tensor:
    """int64 [rows]: for each row whose k proposals lie inside the text, how many of them, from the first, are it."""
    if len(token_ids) < 2 + k:
        return torch.empty(0, dtype=torch.int64)
    text = token_ids[2:].unfold(0, k, 1)  # [rows, k]
    return (proposals[: len(text)] == text).long().cumprod(dim=1).sum(dim=1)
