"""A draft's training against what would be served: the same, a copy, a fine-tune, a stranger, other layers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from vllm_overlay.eagle3.match import (
    DraftMismatchError,
    Served,
    Sizes,
    TrainedOn,
    describe_other_weights,
    find_misfit,
    read_trained_on,
)
from vllm_overlay.eagle3.target import NUM_SAMPLES, load_target, sample_embeddings
from vllm_overlay.fingerprint import fingerprint_model

SIZES = Sizes(num_hidden_layers=6, hidden_size=32, vocab_size=128)
CopyWith = Callable[[Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]], Path]


@pytest.fixture
def trained(model_folder: Path) -> TrainedOn:
    return TrainedOn(
        target="hub/tiny",
        fingerprint=fingerprint_model(str(model_folder), {}),
        layer_ids=(2, 3, 5),
        sizes=SIZES,
        embedding_sample=sample_embeddings(model_folder, 128, 32),
    )


@pytest.fixture
def copy_with(model_folder: Path, tmp_path: Path) -> CopyWith:
    """A copy of the target whose tensors were changed."""

    def make(change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> Path:
        folder = shutil.copytree(model_folder, tmp_path / "copy")
        save_file(change(load_file(str(folder / "model.safetensors"))), str(folder / "model.safetensors"))
        return folder

    return make


def serve(model: Path | str, **changes: Any) -> Served:
    plain = Served(str(model), {}, SIZES, asked_layer_ids=(2, 3, 5), fed_layer_ids=(2, 3, 5), release="0.32.0")
    return replace(plain, **changes)


def test_what_was_trained_on_is_served_in_silence(trained: TrainedOn, model_folder: Path) -> None:
    assert find_misfit(trained, serve(model_folder)) is None
    assert describe_other_weights(trained, serve(model_folder)) is None


def test_a_sample_is_of_the_embeddings_at_even_places(model_folder: Path) -> None:
    embeddings = load_target(model_folder).embed_tokens
    sample = sample_embeddings(model_folder, 128, 32)
    assert len(sample) == NUM_SAMPLES
    assert sample[0] == pytest.approx(float(embeddings[0, 0]), rel=1e-3)
    assert sample[-1] == pytest.approx(float(embeddings[127, 31]), rel=1e-3)
    assert sample_embeddings(model_folder, 128, 64) == () and sample_embeddings(model_folder, 129, 32) == ()
    assert sample_embeddings(model_folder.parent / "nothing", 128, 32) == ()


def quantise(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Projections in 8 bits and the rest in bfloat16, as checkpoints of llm-compressor are."""
    return {
        name: tensor.to(torch.float8_e4m3fn if "proj" in name else torch.bfloat16) for name, tensor in tensors.items()
    }


def tune(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    noise = torch.Generator().manual_seed(1)
    return {
        name: tensor + 0.1 * tensor.std() * torch.randn(tensor.shape, generator=noise)
        for name, tensor in tensors.items()
    }


@pytest.mark.parametrize("change", [quantise, tune], ids=["a quantised copy", "a fine-tune"])
def test_a_relative_is_served_with_a_remark(
    trained: TrainedOn, copy_with: CopyWith, change: Callable[..., dict[str, torch.Tensor]]
) -> None:
    folder = copy_with(change)
    assert find_misfit(trained, serve(folder)) is None
    remark = describe_other_weights(trained, serve(folder))
    assert remark is not None and "trained on hub/tiny (fingerprint" in remark and "a quantised copy" in remark


def test_a_stranger_of_the_same_sizes_is_refused(trained: TrainedOn, copy_with: CopyWith) -> None:
    generator = torch.Generator().manual_seed(1)
    folder = copy_with(lambda tensors: {n: torch.randn(t.shape, generator=generator) for n, t in tensors.items()})
    misfit = find_misfit(trained, serve(folder))
    assert misfit is not None and misfit.startswith(f"trained on another target than {folder}, of the same sizes: hub/")


@pytest.mark.parametrize("kind", ["no sample", "no safetensors", "embeddings in whole numbers"])
def test_weights_that_cannot_be_compared_are_not_refused(trained: TrainedOn, copy_with: CopyWith, kind: str) -> None:
    folder = copy_with(lambda tensors: {name: torch.zeros_like(t, dtype=torch.int8) for name, t in tensors.items()})
    if kind == "no safetensors":
        (folder / "model.safetensors").unlink()
        (folder / "config.json").unlink()
    if kind == "no sample":
        trained = replace(trained, embedding_sample=())
    assert find_misfit(trained, serve(folder)) is None
    assert describe_other_weights(trained, serve(folder)) is not None


def test_a_hubs_name_is_compared_as_a_name(trained: TrainedOn) -> None:
    assert find_misfit(trained, serve("hub/tiny")) is None and find_misfit(trained, serve("hub/other")) is None
    assert describe_other_weights(trained, serve("hub/tiny", config={"of": "another transformers"})) is None
    assert describe_other_weights(trained, serve("hub/other")) is not None


def test_other_sizes_are_refused_by_name(trained: TrainedOn, model_folder: Path) -> None:
    other = Sizes(num_hidden_layers=8, hidden_size=32, vocab_size=130)
    misfit = find_misfit(trained, serve(model_folder, sizes=other))
    assert misfit is not None and "hub/tiny has num_hidden_layers 6, not 8, vocab_size 128, not 130; serve" in misfit


@pytest.mark.parametrize(
    ("wanted", "asked", "fed", "advice"),
    [
        ((2, 4, 5), (2, 4, 5), (2, 3), "serve it with vLLM 0.18 or newer"),
        ((2, 3, 5), (1, 3, 5), (1, 3, 5), "set eagle_aux_hidden_state_layer_ids to [2, 3, 5] again"),
        ((5, 2, 3), (5, 2, 3), (2, 3, 5), "train with --features 2,3,5"),
    ],
    ids=["a release that feeds no others", "a changed config", "another order"],
)
def test_other_layers_are_refused_with_what_to_do(
    trained: TrainedOn,
    model_folder: Path,
    wanted: tuple[int, ...],
    asked: tuple[int, ...],
    fed: tuple[int, ...],
    advice: str,
) -> None:
    misfit = find_misfit(
        replace(trained, layer_ids=wanted), serve(model_folder, asked_layer_ids=asked, fed_layer_ids=fed)
    )
    assert misfit is not None and advice in misfit
    between = f"trained on layers {', '.join(map(str, wanted))} of hub/tiny, and vLLM 0.32.0 would feed it layers"
    assert misfit.startswith(f"{between} {', '.join(map(str, fed))};")


def test_an_older_export_is_compared_as_far_as_it_says(model_folder: Path) -> None:
    facts = json.loads(
        '{"target": "hub/tiny", "target_fingerprint": "0123456789abcdef", "target_layers": 6, "layer_ids": [2, 3, 5]}'
    )
    trained = read_trained_on(facts)
    assert find_misfit(trained, serve(model_folder)) is None
    assert describe_other_weights(trained, serve(model_folder)) is not None
    assert find_misfit(trained, serve(model_folder, sizes=replace(SIZES, num_hidden_layers=8))) is not None


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({}, "KeyError: 'target'"),
        ({"target_fingerprint": None, "layer_ids": None}, "TypeError: 'NoneType' object is not iterable"),
        ({"layer_ids": ["two"]}, "ValueError: invalid literal for int"),
        ({"target_embedding_sample": [0.5]}, "ValueError: 1 values of target_embedding_sample"),
        ("text", "TypeError: string indices must be integers"),
    ],
    ids=["nothing", "no layers", "layers by name", "a short sample", "no object"],
)
def test_facts_that_were_damaged_are_refused(facts: Any, said: str) -> None:
    plain = {"target": "hub/tiny", "target_fingerprint": "01", "target_layers": 6, "layer_ids": [2, 3, 5]}
    with pytest.raises(DraftMismatchError, match=f"cannot be read \\({said}.*export it again"):
        read_trained_on({**plain, **facts} if facts and facts != "text" else facts)
