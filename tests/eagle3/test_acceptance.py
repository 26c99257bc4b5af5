"""The greedy chain: exact for a draft that is its target, pooled over texts, and plain about dead drafts."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.eagle3.test_draft import draft_one_chain
from vllm_overlay.eagle3.acceptance import Acceptance, LoadedDraft, draft_chains, measure_acceptance, pool
from vllm_overlay.eagle3.attention import make_spans
from vllm_overlay.eagle3.batch import Document
from vllm_overlay.eagle3.draft import Draft, DraftConfig

CONFIG = DraftConfig(
    hidden_size=32,
    target_hidden_size=32,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    intermediate_size=48,
    vocab_size=64,
    draft_vocab_size=64,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
    max_position_embeddings=128,
    norm_before_residual=True,  # keeps the states bounded, so that the text does not settle on one token
    layer_ids=(0, 0, 1),
)


def make_draft(seed: int = 0) -> LoadedDraft:
    torch.manual_seed(seed)
    draft = Draft(CONFIG, torch.randn(64, 32))
    for parameter in draft.parameters():
        nn.init.normal_(parameter, std=0.8)
    draft.fc.weight.data.zero_()
    draft.fc.weight.data[:, 64:] = torch.eye(32)  # reads the deepest feature as it is
    return LoadedDraft(draft, torch.arange(64))


@torch.no_grad()
def write_as_one_layer_target(loaded: LoadedDraft, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(features [T, 3, 32], token_ids [T]) of a target that IS this layer: its state after a token is the layer's
    output there, and that state is what it reads next. A draft that is an exact copy must foresee every token."""
    states, token_ids = [torch.randn(32)], [3, 5]
    while len(token_ids) < length:
        features = torch.stack([torch.zeros(len(states), 32), torch.zeros(len(states), 32), torch.stack(states)], dim=1)
        rows = torch.arange(len(states))
        hidden, _ = loaded.draft.start(features, torch.tensor(token_ids[1:]), rows, rows, make_spans(rows, [0]))
        states.append(hidden[-1])
        token_ids.append(int(loaded.draft.logits(hidden[-1:]).argmax()))
    states.append(torch.zeros(32))
    features = torch.zeros(length, 3, 32)
    features[:, 2] = torch.stack(states)
    return features, torch.tensor(token_ids)


def test_an_exact_copy_of_a_one_layer_target_is_always_right() -> None:
    """CASES 32: 100% at every position, also over the draft's own tokens and states."""
    loaded = make_draft()
    features, token_ids = write_as_one_layer_target(loaded, 42)
    assert len(set(token_ids.tolist())) > 5
    # The layer as it is served, token by token with a cache, and not by our code, writes the same.
    document = Document(token_ids, features, torch.zeros(42, 32), torch.ones(42, dtype=torch.bool))
    with torch.no_grad():
        states = draft_one_chain(loaded.draft, document, row=0, steps=40)
        assert [int(loaded.draft.logits(state).argmax()) for state in states] == token_ids[2:].tolist()
    acceptance = measure_acceptance(loaded, features, token_ids, num_prompt_tokens=2, k=4)
    # Checks come after tokens 2, 7, 12, ..., 37; the one after 37 still has its 4 tokens inside the 42.
    assert acceptance == Acceptance(8, 32, (8, 8, 8, 8))
    assert acceptance.acceptance_length == 5.0 and acceptance.rates == (1.0,) * 4 and acceptance.problem is None


def test_the_walk_stops_at_the_first_wrong_token() -> None:
    """One wrong token in the text: the check that meets it accepts what is before, the next starts after it."""
    loaded = make_draft()
    features, token_ids = write_as_one_layer_target(loaded, 42)
    chains = draft_chains(loaded, features, token_ids, 4)
    assert chains.shape == (41, 4)
    assert chains[1].tolist() == token_ids[3:7].tolist()
    other = token_ids.clone()
    other[5] = (other[5] + 1) % 64
    acceptance = measure_acceptance(loaded, features[:9], other[:9], num_prompt_tokens=2, k=4)
    # Row 1 proposes 3..6 and is right twice; row 4 would propose 6..9, beyond the text of 9: not counted.
    assert acceptance == Acceptance(1, 4, (1, 1, 0, 0))


def test_draft_tokens_are_mapped_to_the_targets() -> None:
    loaded = make_draft()
    features, token_ids = write_as_one_layer_target(loaded, 20)
    moved = LoadedDraft(loaded.draft, (torch.arange(64) + 1) % 64)
    first = draft_chains(loaded, features, token_ids, 1)
    assert torch.equal(draft_chains(moved, features, token_ids, 1), (first + 1) % 64)


def test_counts_are_pooled() -> None:
    """CASES 33: 10 in 5 checks and 90 in 30 are 100 in 35, not the mean of two ratios: of accepted tokens, and of the
    tokens that the checks gave, the target's own among them."""
    whole = pool([Acceptance(5, 15, (5, 3, 2)), Acceptance(30, 90, (30, 30, 30))])
    assert whole == Acceptance(35, 105, (35, 33, 32))
    assert whole.num_accepted / whole.num_drafts == 100 / 35 and whole.acceptance_length == 1 + 100 / 35
    given = pool([Acceptance(5, 15, (3, 1, 1)), Acceptance(30, 90, (28, 20, 12))])
    assert given.acceptance_length == pytest.approx(100 / 35, rel=1e-15)


def test_dead_drafts_are_named() -> None:
    """CASES 25: a zeroed head, and a draft that is never right."""
    loaded = make_draft()
    features, token_ids = write_as_one_layer_target(loaded, 30)
    moved = LoadedDraft(loaded.draft, (loaded.target_ids + 1) % 64)
    wrong = measure_acceptance(moved, features, token_ids, 2, 3)
    assert wrong.accepted_per_position == (0, 0, 0) and wrong.num_drafts == 25
    assert "no draft token was accepted in" in str(wrong.problem)
    loaded.draft.lm_head.weight.data.zero_()
    zeroed = measure_acceptance(loaded, features, token_ids, 2, 3)
    assert "lm_head is all zeros" in str(zeroed.problem)
    assert "lm_head is all zeros" in str(pool([wrong, zeroed]).problem)


def test_a_text_too_short_to_check_counts_nothing() -> None:
    loaded = make_draft()
    features, token_ids = write_as_one_layer_target(loaded, 4)
    acceptance = measure_acceptance(loaded, features, token_ids, 2, 3)
    assert acceptance == Acceptance(0, 0, (0, 0, 0))
    assert acceptance.acceptance_length == 1.0 and acceptance.problem is None
