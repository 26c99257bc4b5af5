"""Delta attention in plain torch: by hand; whole sequences as token after token; sequences apart from each other."""

from __future__ import annotations

import math
from typing import Any

import torch

from tools.architecture_standins import decode_delta_attention, gather_states, run_delta_attention

HEADS = 2
WIDTH = 4


def run(tokens: dict[str, Any], states: torch.Tensor, starts: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    return run_delta_attention(
        **tokens,
        A_log=torch.tensor([-1.0, 0.5]),
        g_bias=torch.linspace(-1, 1, HEADS * WIDTH),
        lower_bound=None,
        initial_state=states,
        cu_seqlens=torch.tensor(starts),
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )


def make_tokens(count: int) -> dict[str, Any]:
    torch.manual_seed(0)
    tokens = {name: torch.randn(1, count, HEADS, WIDTH) for name in ("q", "k", "v", "raw_g")}
    return tokens | {"raw_beta": torch.randn(1, count, HEADS)}


def test_one_token_into_an_empty_state_is_read_back() -> None:
    tokens = make_tokens(1)
    out, state = run(tokens, torch.zeros(1, HEADS, WIDTH, WIDTH), [0, 1])
    q, k, v = (tokens[name][0, 0] for name in ("q", "k", "v"))
    for head in range(HEADS):
        beta = 1 / (1 + math.exp(-tokens["raw_beta"][0, 0, head]))
        alike = torch.nn.functional.cosine_similarity(q[head], k[head], dim=0) / math.sqrt(WIDTH)
        torch.testing.assert_close(out[0, 0, head], beta * alike * v[head], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(state[0, head], beta * torch.outer(v[head], k[head] / k[head].norm()))


def test_a_state_fades_by_the_gate_of_each_of_its_keys() -> None:
    """With nothing written (beta is 0) what is left is exp(-exp(A_log) softplus(gate + bias))."""
    tokens = make_tokens(1) | {"raw_beta": torch.full((1, 1, HEADS), -100.0)}
    _, state = run(tokens, torch.ones(1, HEADS, WIDTH, WIDTH), [0, 1])
    gate = tokens["raw_g"][0, 0] + torch.linspace(-1, 1, HEADS * WIDTH).view(HEADS, WIDTH)
    rate = torch.tensor([-1.0, 0.5]).exp()[:, None]
    left = (-rate * torch.log1p(gate.exp())).exp()  # [heads, keys]
    torch.testing.assert_close(state[0], left[:, None, :].expand(HEADS, WIDTH, WIDTH))


def test_what_a_key_holds_is_replaced_and_not_added_to() -> None:
    tokens = make_tokens(2) | {
        "raw_beta": torch.full((1, 2, HEADS), 100.0),
        "raw_g": torch.full((1, 2, HEADS, WIDTH), -100.0),
    }
    tokens["k"][0, 1] = tokens["k"][0, 0]
    out, _ = run(tokens | {"q": tokens["k"]}, torch.zeros(1, HEADS, WIDTH, WIDTH), [0, 2])
    torch.testing.assert_close(out[0, 1], tokens["v"][0, 1] / math.sqrt(WIDTH), rtol=1e-4, atol=1e-5)


def test_whole_sequences_are_token_after_token_and_do_not_touch_each_other() -> None:
    tokens = make_tokens(5)
    whole, states = run(tokens, torch.zeros(2, HEADS, WIDTH, WIDTH), [0, 3, 5])
    cache = torch.zeros(4, HEADS, WIDTH, WIDTH)
    for place, begin, end in ((3, 0, 3), (1, 3, 5)):
        for token in range(begin, end):
            mixed = torch.cat([tokens[name][0, token].flatten() for name in ("q", "k", "v")])
            out, _ = decode_delta_attention(
                mixed[None],
                tokens["raw_g"][:, token : token + 1],
                tokens["raw_beta"][:, token : token + 1],
                torch.tensor([-1.0, 0.5]),
                torch.linspace(-1, 1, HEADS * WIDTH),
                None,
                cache,
                torch.tensor([place]),
            )
            torch.testing.assert_close(out[0, 0], whole[0, token])
    torch.testing.assert_close(cache[[3, 1]], states)
    assert not cache[[0, 2]].any()


def test_a_sequence_without_a_state_begins_with_zeros() -> None:
    states = torch.arange(3.0)[:, None] + 1
    rows = gather_states(states, torch.tensor([2, 0], dtype=torch.int32), torch.tensor([True, False]))
    assert rows.tolist() == [[3.0], [0.0]]
    assert states.tolist() == [[1.0], [2.0], [3.0]]
