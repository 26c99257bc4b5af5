"""Capture on a real engine, through a script that knows nothing of it, against the transformers forward.

One engine with a token budget that cuts prompts (chunked prefill), prefix caching as vLLM has it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.live.runs import Answer, Batch, Reference, make_prompt, run_script
from tests.tiny_models import write_tiny_llama
from vllm_overlay.store import Store, summarize

pytestmark = pytest.mark.live

LAYERS = 8
TOLERANCE = 1e-4


PREFIX = make_prompt(0, 16)
SHARED = [make_prompt(i, length, PREFIX) for i, length in enumerate((17, 20, 23, 26, 30, 33, 36, 40))]
LADDER = [make_prompt(100 + i, i + 1) for i in range(40)]
LONG = make_prompt(7, 61)

BATCHES = {
    "one by one": [Batch([prompt], 2) for prompt in SHARED],
    "one batch": [Batch([make_prompt(50 + i, len(p), PREFIX[::-1]) for i, p in enumerate(SHARED)], 2)],
    "again": [Batch([make_prompt(50 + i, len(p), PREFIX[::-1]) for i, p in enumerate(SHARED)], 2)],
    "ladder": [Batch(LADDER, 3)],
    "long": [Batch([LONG], 64)],
    "twice": [Batch([make_prompt(9, 64)], 1), Batch([make_prompt(9, 64)], 1)],
}
# One prompt, whole and in windows at once: what is asked, and the positions that are wanted of its 48 + 6 - 1; None: no
# record. The block of 32 tokens that they share is in the prefix cache after the first, which is whole.
QUESTION, GENERATED = make_prompt(21, 48), 6
ASKED: list[tuple[dict[str, Any], tuple[int, int] | None]] = [
    ({"tag": "whole"}, (0, 53)),
    ({"tokens": "prompt", "tag": "a prompt"}, (0, 48)),
    ({"tokens": "last"}, (47, 48)),
    ({"tokens": [10, 40]}, (10, 40)),
    ({"capture": False}, None),
    ({"tokens": [-5, None]}, (43, 53)),
    ({"tokens": [33, 34]}, (33, 34)),
    ({"tokens": [50, 52]}, (50, 52)),
    ({"tokens": [50, 900]}, (50, 53)),
    ({"tokens": [500, 900]}, None),
    ({"tokens": [9, 3], "tag": "ignored with the rest"}, (0, 53)),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model"), layers=LAYERS, spread=0.05)


@pytest.fixture(scope="module")
def reference(model: Path) -> Reference:
    return Reference(model)


def run_captured(
    folder: Path, model: Path, layers: str | None, budget: int
) -> tuple[dict[str, list[list[Answer]]], Store]:
    environment = {
        "VLLM_OVERLAY": "1",
        "VLLM_OVERLAY_CAPTURE": str(folder / "store"),
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "0",
    }
    if layers:
        environment["VLLM_OVERLAY_LAYERS"] = layers
    groups = {**BATCHES, "asked": [Batch([QUESTION] * len(ASKED), GENERATED, overlays=tuple(o for o, _ in ASKED))]}
    batches = [batch for group in groups.values() for batch in group]
    answers = iter(
        run_script(
            folder,
            model,
            batches,
            environment=environment,
            max_num_batched_tokens=budget,
            max_num_seqs=min(32, budget),
            block_size=32,
        )
    )
    return {name: [next(answers) for _ in group] for name, group in groups.items()}, Store.open(folder / "store")


@pytest.fixture(scope="module")
def captured(tmp_path_factory: pytest.TempPathFactory, model: Path) -> tuple[dict[str, list[list[Answer]]], Store]:
    return run_captured(tmp_path_factory.mktemp("captured"), model, "all", budget=64)


@pytest.fixture(scope="module")
def chunked(tmp_path_factory: pytest.TempPathFactory, model: Path) -> tuple[dict[str, list[list[Answer]]], Store]:
    """CASES 1 (d) and 4: a budget of 16 tokens a step; and the default layers (CASES 15)."""
    return run_captured(tmp_path_factory.mktemp("chunked"), model, None, budget=16)


def check_records(answers: dict[str, list[list[Answer]]], store: Store, reference: Reference) -> float:
    """Every answer has its complete record, the right tokens, the right row count; returns the largest difference."""
    requests = [
        (prompt, answer)
        for name, group in BATCHES.items()
        for batch, replies in zip(group, answers[name], strict=True)
        for prompt, answer in zip(batch.prompts, replies, strict=True)
    ]
    assert len(store) == len(requests) + sum(wanted is not None for _, wanted in ASKED)
    worst = 0.0
    for prompt, answer in requests:
        record = store[answer.request_id]
        text = prompt + answer.token_ids
        assert record.complete
        assert record.num_prompt_tokens == len(prompt)
        assert record.token_ids.tolist() == text[:-1], f"request {answer.request_id}"
        assert len(record.hidden_states) == len(prompt) + len(answer.token_ids) - 1
        expected = reference.states(record.token_ids)[:, list(store.layer_ids)]
        worst = max(worst, float((record.hidden_states - expected).abs().max()))
    return worst


def test_every_state_is_the_reference(
    captured: tuple[dict[str, list[list[Answer]]], Store], reference: Reference
) -> None:
    """CASES 1 (a) to (c), 2, 3 and 41: ids 0..N, one by one, batched, from the prefix cache, 40 prompts of 1..40
    tokens, and vLLM may pickle nothing that it sends."""
    answers, store = captured
    assert store.layer_ids == tuple(range(LAYERS + 1))
    assert check_records(answers, store, reference) < TOLERANCE


def test_a_budget_of_16_tokens_changes_nothing(
    chunked: tuple[dict[str, list[list[Answer]]], Store], reference: Reference
) -> None:
    """CASES 1 (d) and 4."""
    answers, store = chunked
    assert check_records(answers, store, reference) < TOLERANCE
    assert len(store[answers["long"][0][0].request_id].token_ids) == 61 + 64 - 1


@pytest.mark.parametrize("budget", [64, 16])
def test_a_request_says_what_is_captured_of_it(
    budget: int, request: pytest.FixtureRequest, reference: Reference
) -> None:
    """In one batch, beside a whole one and with its blocks in the prefix cache; rows are slices of the whole one's."""
    answers, store = request.getfixturevalue("captured" if budget == 64 else "chunked")
    (replies,) = answers["asked"]
    assert {tuple(reply.token_ids) for reply in replies} == {tuple(replies[0].token_ids)}
    whole = store[replies[0].request_id]
    assert whole.token_ids.tolist() == QUESTION + replies[0].token_ids[:-1]
    expected = reference.states(whole.token_ids)[:, list(store.layer_ids)]
    for (overlay, wanted), reply in zip(ASKED, replies, strict=True):
        assert (reply.request_id in store) == (wanted is not None), overlay
        if wanted is None:
            continue
        record, (start, end) = store[reply.request_id], wanted
        assert (record.first_position, record.complete) == (start, True), overlay
        assert record.token_ids.tolist() == whole.token_ids[start:end].tolist(), overlay
        assert record.num_prompt_tokens == min(max(0, 48 - start), end - start), overlay
        assert float((record.hidden_states - expected[start:end]).abs().max()) < TOLERANCE, overlay
        assert float((record.hidden_states - whole.hidden_states[start:end]).abs().max()) < TOLERANCE, overlay
    assert store.tags() == {"whole", "a prompt"}
    # Only the first computes positions 0 .. 32: a window there refers to its rows.
    assert store[replies[3].request_id].hidden_states[:22].equal(whole.hidden_states[10:32])
    assert summarize(store).windows == 6


def test_the_default_layers_are_those_of_eagle3(
    chunked: tuple[dict[str, list[list[Answer]]], Store], captured: tuple[dict[str, list[list[Answer]]], Store]
) -> None:
    """CASES 15: the default gives what the ids give when they are named: the same columns of the same states."""
    default, everything = chunked[1], captured[1]
    assert default.layer_ids == (2, 4, 5, 8)
    for record in default:
        other = everything[record.request_id]
        assert record.token_ids.equal(other.token_ids)
        assert torch.allclose(record.hidden_states, other.hidden_states[:, [2, 4, 5, 8]], atol=TOLERANCE)


def test_shared_prefixes_are_stored_once(captured: tuple[dict[str, list[list[Answer]]], Store]) -> None:
    """A cached prefix is referred to and not written again: the second 64-token prompt adds fewer rows than it has."""
    _, store = captured
    referenced = sum(len(record.token_ids) for record in store)
    assert summarize(store).rows_stored < referenced


def test_the_last_id_is_before_the_final_norm(
    captured: tuple[dict[str, list[list[Answer]]], Store], reference: Reference
) -> None:
    """CASES 13: lm_head(norm(state N)) is the model's logits; the layer before it is not."""
    record = captured[1][captured[0]["long"][0][0].request_id]
    logits = reference.logits(record.token_ids)
    last = reference.logits_of(record.hidden_states[:, LAYERS])
    assert float((last - logits).abs().max()) < TOLERANCE
    assert float((reference.logits_of(record.hidden_states[:, LAYERS - 1]) - logits).abs().max()) > 100 * TOLERANCE


def test_text_is_the_same_with_capture_off(
    tmp_path: Path, model: Path, captured: tuple[dict[str, list[list[Answer]]], Store]
) -> None:
    """CASES 6: greedy text of 64 tokens."""
    plain = run_script(tmp_path, model, BATCHES["long"], max_num_batched_tokens=64, max_num_seqs=32)
    assert len(plain[0][0].token_ids) == 64
    assert plain[0][0].token_ids == captured[0]["long"][0][0].token_ids


def test_an_engine_in_the_callers_own_process_loses_nothing(tmp_path: Path, model: Path, reference: Reference) -> None:
    """Nobody tells its worker of the last finished requests: they are written when the process ends. Its rows are in 8
    bits, as far from the reference as the nearest number of e4m3 may be."""
    batch = Batch(SHARED, 4)
    environment = {
        "VLLM_OVERLAY": "1",
        "VLLM_OVERLAY_CAPTURE": str(tmp_path / "store"),
        "VLLM_OVERLAY_LAYERS": "8",
        "VLLM_OVERLAY_TOKENS": "prompt",
        "VLLM_OVERLAY_DTYPE": "fp8",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }
    answers = run_script(tmp_path / "run", model, [batch], environment=environment)[0]
    with Store.open(tmp_path / "store") as store:
        assert len(store) == len(SHARED)
        for prompt, answer in zip(SHARED, answers, strict=True):
            record = store[answer.request_id]
            assert record.token_ids.tolist() == prompt
            expected = reference.states(record.token_ids)[:, [8]]
            peaks = expected.abs().amax(dim=-1, keepdim=True)
            assert record.hidden_states.dtype is torch.bfloat16
            error = (record.hidden_states.float() - expected).abs()
            assert bool((error <= torch.maximum(expected.abs() / 16, peaks / (224 * 1024)) + TOLERANCE).all())
            assert float(error.max()) > TOLERANCE
