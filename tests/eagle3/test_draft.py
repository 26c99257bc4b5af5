"""The draft's test-time training against an unroll token by token, and what its rows can and cannot see."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from vllm_overlay.eagle3.attention import make_spans
from vllm_overlay.eagle3.batch import Batch, Columns, Document, make_chunks, pack
from vllm_overlay.eagle3.draft import Draft, DraftConfig
from vllm_overlay.eagle3.loss import Objective, Scores, TargetHead, unroll

CPU = torch.device("cpu")


def make_draft(hidden_size: int = 32, seed: int = 0, **form: Any) -> Draft:
    torch.manual_seed(seed)
    config = DraftConfig(
        hidden_size=hidden_size,
        target_hidden_size=32,
        num_attention_heads=hidden_size // 8,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=48,
        vocab_size=64,
        draft_vocab_size=24,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        max_position_embeddings=128,
        layer_ids=(2, 3, 4),
        **{"norm_before_residual": False, **form},
    )
    draft = Draft(config, torch.randn(64, 32))
    for parameter in draft.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return draft


def make_document(length: int, masked: list[int] | None = None, seed: int = 1) -> Document:
    generator = torch.Generator().manual_seed(seed)
    mask = torch.ones(length, dtype=torch.bool)
    if masked is not None:
        mask = torch.zeros(length, dtype=torch.bool)
        mask[masked] = True
    return Document(
        torch.randint(0, 64, (length,), generator=generator),
        torch.randn(length, 3, 32, generator=generator),
        torch.randn(length, 32, generator=generator),
        mask,
    )


def pack_documents(documents: Sequence[Document], steps: int, device: torch.device, attention: str = "mask") -> Batch:
    """With their states one after another, as a corpus reads them."""
    rows = [torch.cat([each.features, each.final_states[:, None]], 1) for each in documents]
    return pack(documents, torch.cat(rows), Columns(slice(0, 3), 3), steps, device, attention)


def make_head(seed: int = 2) -> TargetHead:
    generator = torch.Generator().manual_seed(seed)
    return TargetHead(torch.ones(32), 1e-5, torch.randn(24, 32, generator=generator))


def rotate_one(x: torch.Tensor, position: int) -> torch.Tensor:
    """Rotary embedding of [heads, 8] by complex numbers, another way than ours."""
    angles = position * 10000.0 ** (-torch.arange(4).double() / 4)
    turned = torch.complex(x[:, :4].double(), x[:, 4:].double()) * torch.polar(torch.ones(4).double(), angles)
    return torch.cat([turned.real, turned.imag], dim=-1).to(x.dtype)


def norm_one(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x / (x.square().mean() + 1e-5).sqrt() * weight


def fuse_one(draft: Draft, features: torch.Tensor) -> torch.Tensor:
    """[3, 32] -> [hidden], as vLLM's `combine_hidden_states` has it."""
    if draft.config.norm_before_fc:
        features = norm_one(features.flatten(), draft.input_norm.weight).view(3, 32)
    if draft.config.fc_norm:
        features = torch.stack([norm_one(x, norm.weight) for x, norm in zip(features, draft.fc_norm, strict=True)])
    return draft.fc.weight @ features.flatten()


def draft_one_chain(draft: Draft, document: Document, row: int, steps: int) -> list[torch.Tensor]:
    """A draft as it is served: a KV cache, one token at a time; features up to `row`, then its own output."""
    layer, cache = draft.midlayer, []
    tokens = document.token_ids
    outputs = []
    hidden = torch.empty(0)
    for position in range(row + steps):
        own = norm_one(hidden, draft.norm.weight) if draft.config.norm_output and position > row else hidden
        feature = fuse_one(draft, document.features[position]) if position <= row else own
        normed = layer.hidden_norm(feature)
        x = torch.cat([layer.input_layernorm(draft.embed(tokens[position + 1])), normed])
        query, key, value = (getattr(layer.self_attn, f"{name}_proj")(x).view(-1, 8) for name in "qkv")
        if draft.config.style == "qwen3":
            query = torch.stack([norm_one(one, layer.self_attn.q_norm.weight) for one in query])
            key = torch.stack([norm_one(one, layer.self_attn.k_norm.weight) for one in key])
        query = rotate_one(query, position)
        cache.append((rotate_one(key, position), value))
        group = len(query) // 2
        heads = []
        for number, q in enumerate(query):
            scores = torch.stack([key[number // group] @ q for key, _ in cache]) / 8**0.5
            weights = scores.softmax(0)
            heads.append(
                sum(weight * value[number // group] for weight, (_, value) in zip(weights, cache, strict=True))
            )
        residual = normed if draft.config.norm_before_residual else feature
        hidden = layer.leave(torch.cat(heads), residual)
        if position >= row:
            outputs.append(hidden)
    return outputs


FORMS: list[dict[str, Any]] = [
    {},
    {"style": "qwen3"},
    {"norm_before_residual": True},
    {"norm_before_fc": True},
    {"fc_norm": True},
    {"norm_output": True},
    {"norm_before_residual": True, "norm_before_fc": True, "fc_norm": True, "norm_output": True, "style": "qwen3"},
]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: "+".join(form) or "plain")
@pytest.mark.parametrize("hidden_size", [32, 16])
def test_steps_and_gradients_equal_a_token_by_token_unroll(hidden_size: int, form: dict[str, Any]) -> None:
    """CASES 28 in float64, for every form of the norms, both kinds of layer, and a draft narrower than its target."""
    draft = make_draft(hidden_size, **form).double()
    document = make_document(9, masked=[4, 5, 6, 7, 8])
    document = Document(
        document.token_ids, document.features.double(), document.final_states.double(), document.loss_mask
    )
    batch = pack_documents([document], 3, CPU)
    assert batch.rows.tolist() == [1, 2, 3, 4, 5, 6, 7]
    outputs = unroll(draft, batch, 3)
    compared = [(number, row) for number, row in enumerate(batch.rows.tolist()) if row < 6]  # row 6 would read token 9
    chains = {row: draft_one_chain(draft, document, row, 3) for _, row in compared}
    direction = torch.randn(hidden_size, dtype=torch.float64)
    ours = theirs = torch.zeros((), dtype=torch.float64)
    for number, row in compared:
        for step in range(3):
            torch.testing.assert_close(outputs[step][number], chains[row][step], atol=1e-11, rtol=1e-11)
            ours = ours + outputs[step][number] @ direction
            theirs = theirs + chains[row][step] @ direction

    named = {name: parameter for name, parameter in draft.named_parameters() if "lm_head" not in name}
    if not draft.config.norm_output:
        del named["norm.weight"]  # which only the head reads
    found, wanted = (torch.autograd.grad(total, list(named.values())) for total in (ours, theirs))
    for name, one, other in zip(named, found, wanted, strict=True):
        assert other.any(), name
        torch.testing.assert_close(one, other, atol=1e-9, rtol=1e-9, msg=name)


def test_a_document_is_the_same_alone_and_packed() -> None:
    draft = make_draft()
    documents = [make_document(n, seed=n) for n in (9, 5, 14)]
    with torch.no_grad():
        together = unroll(draft, pack_documents(documents, 3, CPU), 3)
        first = 0
        for document in documents:
            alone = unroll(draft, pack_documents([document], 3, CPU), 3)
            for step in range(3):
                torch.testing.assert_close(together[step][first : first + len(alone[step])], alone[step])
            first += len(alone[0])
    assert first == len(together[0])


def test_documents_do_not_see_each_other() -> None:
    """The loss of one document has no gradient in the features of its neighbours."""
    draft = make_draft()
    before, middle, after = (make_document(8, seed=n) for n in range(3))
    batch = pack_documents([before, middle, after], 3, CPU)
    batch.features.requires_grad_()
    outputs = unroll(draft, batch, 3)
    rows = (batch.rows >= 8) & (batch.rows < 16)
    sum(output[rows].square().sum() for output in outputs).backward()
    moved = batch.features.grad.abs().sum((1, 2)) > 0
    assert moved.tolist() == [False] * 8 + [True] * 7 + [False] * 9


def test_long_documents_are_cut_into_spans_without_a_change(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = torch.tensor([0, 1, 2, 5, 6, 7, 9])
    spans = make_spans(rows, [0, 5, 8], rows_per_span=2)
    assert [(s.row_start, s.row_stop, s.key_start, s.key_stop) for s in spans] == [
        (0, 2, 0, 2),
        (2, 3, 0, 3),
        (3, 5, 5, 7),
        (5, 6, 5, 8),
        (6, 7, 8, 10),
    ]
    draft, document = make_draft(), make_document(20)
    with torch.no_grad():
        whole = unroll(draft, pack_documents([document], 3, CPU), 3)
        monkeypatch.setattr("vllm_overlay.eagle3.batch.make_spans", lambda r, s: make_spans(r, s, rows_per_span=3))
        cut = unroll(draft, pack_documents([document], 3, CPU), 3)
    for one, other in zip(whole, cut, strict=True):
        torch.testing.assert_close(one, other)


def test_the_mask_shifts_with_the_tokens() -> None:
    """8 tokens, answer at 4..6: row 3 is scored, row 6 is not; and at step s everything is s further on."""
    batch = pack_documents([make_document(8, masked=[4, 5, 6])], 3, CPU)
    assert batch.rows.tolist() == [1, 2, 3, 4, 5]
    scored = [batch.rows[index].tolist() for index in batch.scored]
    assert scored == [[3, 4, 5], [2, 3, 4], [1, 2, 3]]
    assert [index.tolist() for index in batch.scored_targets] == [[0, 1, 2]] * 3
    document = make_document(8, masked=[4, 5, 6])
    torch.testing.assert_close(batch.final_states, document.final_states[4:7])
    for step in range(3):
        assert batch.row_tokens[step].tolist() == document.token_ids[(batch.rows + 1 + step).clamp(max=7)].tolist()


@pytest.mark.parametrize(("steps", "learning"), [(1, [3, 4, 5]), (3, [1, 2, 3, 4, 5])])
def test_the_row_before_the_answer_learns_and_its_last_does_not(steps: int, learning: list[int]) -> None:
    """CASES 26: 8 tokens, answer at 4..6: the loss has a gradient at row 3, and none at row 6."""
    document = make_document(8, masked=[4, 5, 6])
    features = document.features.clone().requires_grad_()
    draft = make_draft()
    draft.midlayer.self_attn.o_proj.weight.data.zero_()  # so that no row's gradient comes from a later one
    batch = pack_documents([replace(document, features=features)], steps, CPU)
    Objective(draft, make_head(), steps).score(batch, torch.ones(steps)).weighted.backward()
    assert features.grad.abs().sum((1, 2)).nonzero()[:, 0].tolist() == learning


def test_the_mask_ends_with_its_document() -> None:
    """A shift never reaches into the next document, whose first tokens are masked here."""
    batch = pack_documents([make_document(4, masked=[3]), make_document(4, masked=[0, 1])], 3, CPU)
    assert [batch.rows[index].tolist() for index in batch.scored] == [[2, 4], [1], [0]]


def test_a_batch_without_a_scored_row_is_zero() -> None:
    draft = make_draft()
    batch = pack_documents([make_document(6, masked=[])], 3, CPU)
    scores = Objective(draft, make_head(), 3).score(batch, torch.tensor([0.5, 0.3, 0.2]))
    scores.weighted.backward()
    assert scores.weighted.item() == 0 and scores.cross_entropy.tolist() == [0, 0, 0]
    assert all(p.grad is None or not p.grad.any() for p in draft.parameters())


def score_plainly(draft: Draft, head: TargetHead, document: Document, weights: torch.Tensor) -> Scores:
    """The whole objective written out, position by position, for autograd."""
    batch = pack_documents([document], len(weights), CPU)
    outputs = unroll(draft, batch, len(weights))
    cross_entropy, kl, agreed = (torch.zeros(3, dtype=weights.dtype) for _ in range(3))
    for step in range(len(weights)):
        for position in document.loss_mask.nonzero()[:, 0].tolist():
            row = position - 1 - step
            if row < 0:
                continue
            hidden = outputs[step][batch.rows.tolist().index(row)]
            state = document.final_states[position]
            target = (head.head @ (state / (state.square().mean() + head.eps).sqrt() * head.norm)).softmax(0)
            logits = draft.logits(hidden)
            cross_entropy[step] = cross_entropy[step] - (target * logits.log_softmax(0)).sum()
            kl[step] += (target * (target.log() - logits.log_softmax(0))).sum().detach()
            agreed[step] += bool(logits.argmax() == target.argmax())
    return Scores((weights * cross_entropy).sum(), cross_entropy, kl, agreed)


@pytest.mark.parametrize("targets_per_chunk", [2, 1024])
@pytest.mark.parametrize("train_head", [True, False])
def test_the_loss_and_its_gradients_are_those_of_the_formula(
    targets_per_chunk: int, train_head: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float64, in one chunk and in several: figures and every parameter's gradient to 1e-12."""
    monkeypatch.setattr(
        "vllm_overlay.eagle3.batch.make_chunks", partial(make_chunks, targets_per_chunk=targets_per_chunk)
    )
    head = TargetHead(torch.rand(32).double() + 0.5, 1e-5, make_head().head.double())
    document = make_document(10, masked=[1, 3, 4, 7, 9])
    document = Document(
        document.token_ids, document.features.double(), document.final_states.double(), document.loss_mask
    )
    weights = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    draft = make_draft().double()
    draft.lm_head.requires_grad_(train_head)
    expected = score_plainly(draft, head, document, weights)
    batch = pack_documents([document], 3, CPU)
    assert len(batch.chunks) == (2 if targets_per_chunk == 2 else 1)
    scores = Objective(draft, head, 3).score(batch, weights)
    for name in ("weighted", "cross_entropy", "kl", "agreed"):
        torch.testing.assert_close(getattr(scores, name), getattr(expected, name), rtol=1e-12, atol=1e-12)

    parameters = {name: parameter for name, parameter in draft.named_parameters() if parameter.requires_grad}
    assert ("lm_head.weight" in parameters) is train_head
    wanted = torch.autograd.grad(expected.weighted, list(parameters.values()))
    found = torch.autograd.grad(scores.weighted, list(parameters.values()))
    for name, one, other in zip(parameters, found, wanted, strict=True):
        assert other.any(), name
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12, msg=name)


def test_the_targets_embeddings_are_not_trained_and_not_saved() -> None:
    assert not any("embed" in name for name in make_draft().state_dict())
    assert make_draft(16).state_dict()["embed_tokens.weight"].shape == (64, 16)
    assert make_draft(16).fc.weight.shape == (16, 96)  # CASES 31


@pytest.mark.parametrize("style", ["llama", "qwen3"])
def test_queries_and_keys_are_of_the_projections_dtype(style: str) -> None:
    """Under autocast the projections are of 16 bits, and the kernels want queries, keys and values of one dtype."""
    attention = make_draft(style=style).midlayer.self_attn
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        keys, values = attention.keys_and_values(torch.randn(5, 64), torch.arange(5))
        queries = attention.queries(torch.randn(5, 64), torch.arange(5))
    assert {queries.dtype, keys.dtype, values.dtype} == {torch.bfloat16}
