"""The target's ends: found under every name, the norm applied once, other norms refused; and the draft vocabulary."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from vllm_overlay.eagle3.loss import TargetHead
from vllm_overlay.eagle3.target import load_layer, load_target
from vllm_overlay.eagle3.vocabulary import DraftVocabulary, choose_vocabulary, count_tokens
from vllm_overlay.errors import OverlayError


def test_the_last_state_gives_the_models_logits(
    reference: LlamaForCausalLM, model_folder: Path, states_of: Callable[..., torch.Tensor]
) -> None:
    """CASES 13: id N through our norm and head is the model's own logits; id N-1 is not. The norm is applied once."""
    target = load_target(model_folder)
    token_ids = torch.tensor([5, 9, 77, 3, 100, 4])
    states = states_of(token_ids, (6, 5))
    with torch.no_grad():
        expected = reference(input_ids=token_ids[None]).logits[0]
    torch.testing.assert_close(target.logits(states[:, 0]), expected, atol=1e-4, rtol=1e-4)
    assert (target.logits(states[:, 1]) - expected).abs().max() > 0.1

    kept = torch.tensor([3, 5, 9, 77])
    head = TargetHead(target.final_norm, target.config.rms_norm_eps, target.lm_head[kept])
    torch.testing.assert_close(
        head.log_probabilities(states[:, 0]), expected[:, kept].log_softmax(-1), atol=1e-5, rtol=1e-4
    )


def test_a_layer_is_read_by_its_inner_names(reference: LlamaForCausalLM, model_folder: Path) -> None:
    layer = load_layer(model_folder, 5)
    assert torch.equal(layer["mlp.up_proj.weight"], reference.model.layers[5].mlp.up_proj.weight)
    assert len(layer) == 9


def test_tied_nested_and_sharded_checkpoints(edit_checkpoint: Callable[..., Path], model_folder: Path) -> None:
    tensors = load_file(str(model_folder / "model.safetensors"))
    del tensors["lm_head.weight"]
    nested = {f"language_model.{name}": tensor for name, tensor in tensors.items()}
    nested["language_model.model.layers.5.embed_tokens.weight"] = torch.zeros(1)  # a copy as in DeepSeek's MTP layers

    def nest(config: dict[str, Any]) -> None:
        inner = {**config, "tie_word_embeddings": True}
        config.clear()
        config.update(model_type="outer", text_config=inner)

    folder = edit_checkpoint(nest, nested)
    names = sorted(nested)
    (folder / "model.safetensors").unlink()
    halves = {"a.safetensors": names[: len(names) // 2], "b.safetensors": names[len(names) // 2 :]}
    for file, part in halves.items():
        save_file({name: nested[name] for name in part}, str(folder / file))
    index = {"weight_map": {name: file for file, part in halves.items() for name in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))

    target = load_target(folder)
    assert torch.equal(target.lm_head, tensors["model.embed_tokens.weight"])
    assert torch.equal(target.final_norm, tensors["model.norm.weight"])
    assert target.config.num_hidden_layers == 6


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"model_type": "gemma2"}, r"'gemma2'.*\(1 \+ weight\)"),
        ({"model_type": "gpt_neox"}, "'gpt_neox'.*LayerNorm"),
        ({"logits_scaling": 8.0}, "logits_scaling"),
        ({"rms_norm_eps": None}, "no rms_norm_eps"),
        ({"vocab_size": 256}, r"expected floating point \(256, 32\)"),
    ],
)
def test_targets_of_another_kind_are_refused(
    edit_checkpoint: Callable[..., Path], change: dict[str, Any], reason: str
) -> None:
    def edit(config: dict[str, Any]) -> None:
        config.update(change)
        if change.get("rms_norm_eps", 1) is None:
            del config["rms_norm_eps"]

    with pytest.raises(OverlayError, match=reason):
        load_target(edit_checkpoint(edit))


def test_missing_files_are_named(tmp_path: Path, edit_checkpoint: Callable[..., Path], model_folder: Path) -> None:
    with pytest.raises(OverlayError, match=r"no config\.json"):
        load_target(tmp_path / "nowhere")
    tensors = load_file(str(model_folder / "model.safetensors"))
    del tensors["lm_head.weight"]
    with pytest.raises(OverlayError, match="no lm_head"):
        load_target(edit_checkpoint(lambda config: None, tensors))


def test_special_tokens_come_from_the_configs_and_the_tokenizer(edit_checkpoint: Callable[..., Path]) -> None:
    folder = edit_checkpoint(lambda config: config.update(eos_token_id=[2, 17]))
    tokenizer = {"added_tokens": [{"id": 40, "special": True}, {"id": 41, "special": False}]}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert load_target(folder).config.special_token_ids == (1, 2, 17, 40)


def test_offsets_of_the_kept_ids() -> None:
    """CASES 29: kept ids [0, 3, 4, 9]."""
    vocabulary = DraftVocabulary(torch.tensor([0, 3, 4, 9]), 12)
    assert vocabulary.d2t.tolist() == [0, 2, 2, 6]
    assert vocabulary.t2d.nonzero()[:, 0].tolist() == [0, 3, 4, 9]
    assert not vocabulary.is_full


def test_the_most_frequent_tokens_under_the_mask_are_kept() -> None:
    token_ids = torch.tensor([1, 7, 7, 7, 5, 5, 3, 3, 9, 2])
    mask = torch.tensor([0, 1, 1, 0, 1, 1, 1, 0, 1, 0]).bool()
    counted, present = count_tokens([(token_ids, mask)], 12)
    assert counted[[7, 5, 3, 9, 1]].tolist() == [2, 2, 1, 1, 0] and present[7] == 3
    assert choose_vocabulary(counted, present, 3).ids.tolist() == [3, 5, 7]  # 3 and 9 tie: the smaller id
    assert choose_vocabulary(counted, present, 3, special_token_ids=[2, 11]).ids.tolist() == [2, 5, 7]  # 11: not there
    with pytest.raises(OverlayError, match="--draft-vocab-size 13"):
        choose_vocabulary(counted, present, 13)
    with pytest.raises(OverlayError, match="wrong --model"):
        count_tokens([(token_ids, mask)], 9)


def test_documents_beyond_those_counted_at_once_are_counted_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_overlay.eagle3.vocabulary.COUNTED_AT_ONCE", 2)
    documents = [(torch.tensor([number, 7]), torch.tensor([True, False])) for number in range(5)]
    counted, present = count_tokens(documents, 8)
    assert counted.tolist() == [1, 1, 1, 1, 1, 0, 0, 0] and present.tolist() == [1, 1, 1, 1, 1, 0, 0, 5]


@given(st.lists(st.integers(0, 29), min_size=1, max_size=60), st.integers(1, 30))
def test_any_vocabulary_maps_back(tokens: list[int], size: int) -> None:
    counted, present = count_tokens([(torch.tensor(tokens), torch.ones(len(tokens), dtype=torch.bool))], 30)
    vocabulary = choose_vocabulary(counted, present, size)
    assert len(vocabulary) == size == int(vocabulary.t2d.sum())
    assert (torch.arange(size) + vocabulary.d2t).tolist() == vocabulary.ids.tolist() == sorted(vocabulary.ids.tolist())
    kept, left = counted[vocabulary.ids], counted[~vocabulary.t2d]
    assert len(left) == 0 or kept.min() >= left.max()


def test_a_vocabulary_survives_its_file(tmp_path: Path) -> None:
    vocabulary = DraftVocabulary(torch.tensor([0, 3, 4, 9]), 12)
    vocabulary.save(tmp_path / "v.safetensors")
    loaded = DraftVocabulary.load(tmp_path / "v.safetensors")
    assert loaded.ids.tolist() == [0, 3, 4, 9] and loaded.vocab_size == 12
