"""A tiny target on disk, and stores made from its own greedy text."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from vllm_overlay.store import PendingRecord, StoreMeta, StoreWriter

LAYERS, HIDDEN, VOCABULARY = 6, 32, 128
LAYER_IDS = (6, 2, 0, 3)  # not in order: readers must look columns up by id


@pytest.fixture(scope="session")
def reference() -> LlamaForCausalLM:
    """TINY of CASES.md: random, 6 layers, hidden 32, vocabulary 128, float32."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.4,  # sharp distributions, so that there is something to learn
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name:  # with weights of 1, a norm applied twice would not show
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return model


@pytest.fixture(scope="session")
def model_folder(reference: LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    reference.save_pretrained(folder)
    return folder


def forward(model: LlamaForCausalLM, token_ids: torch.Tensor, layer_ids: Sequence[int]) -> torch.Tensor:
    """States `[T, layers, hidden]` by our ids; id N is taken before the final norm."""
    seen: dict[int, torch.Tensor] = {}

    def keep(layer: int) -> Callable[..., None]:
        def hook(module: Any, args: tuple[torch.Tensor, ...], kwargs: dict[str, Any]) -> None:
            seen[layer] = (args[0] if args else kwargs["hidden_states"])[0]

        return hook

    blocks = [*model.model.layers, model.model.norm]
    hooks = [block.register_forward_pre_hook(keep(i), with_kwargs=True) for i, block in enumerate(blocks)]
    try:
        with torch.no_grad():
            model(input_ids=token_ids[None], use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return torch.stack([seen[layer] for layer in layer_ids], dim=1)


def greedy(model: LlamaForCausalLM, prompt: torch.Tensor, length: int) -> torch.Tensor:
    token_ids = prompt
    with torch.no_grad():
        while len(token_ids) < length:
            token_ids = torch.cat([token_ids, model(input_ids=token_ids[None]).logits[0, -1].argmax()[None]])
    return token_ids


@pytest.fixture(scope="session")
def states_of(reference: LlamaForCausalLM) -> Callable[[torch.Tensor, Sequence[int]], torch.Tensor]:
    return lambda token_ids, layer_ids: forward(reference, token_ids, layer_ids)


@pytest.fixture(scope="session")
def write_on(reference: LlamaForCausalLM) -> Callable[[torch.Tensor, int], torch.Tensor]:
    return lambda prompt, length: greedy(reference, prompt, length)


StoreMaker = Callable[..., Path]


@pytest.fixture(scope="session")
def make_store(reference: LlamaForCausalLM) -> StoreMaker:
    """A store of the target's own text: `records` of them, of 8 prompt tokens and some more."""

    def make(
        path: Path,
        records: int = 12,
        layer_ids: Sequence[int] = LAYER_IDS,
        fingerprint: str = "tiny",
        shift: int = 0,
        incomplete: int = 0,
        loss_mask: np.ndarray[Any, Any] | None = None,
    ) -> Path:
        meta = StoreMeta(tuple(layer_ids), HIDDEN, "float32", LAYERS, "tiny", fingerprint, "0.0.0", "V1")
        writer = StoreWriter.open(path, meta)
        generator = torch.Generator().manual_seed(7)
        for number in range(records):
            prompt = torch.randint(3, VOCABULARY, (8,), generator=generator)
            token_ids = greedy(reference, prompt, 20 + number % 5)
            states = forward(reference, token_ids, layer_ids).roll(shift, dims=0).contiguous()
            first = writer.append(states)
            rows = np.arange(first, first + len(token_ids), dtype=np.int64)
            complete = number >= incomplete
            if not complete:
                rows[0] = -1
            mask = None if loss_mask is None else np.resize(loss_mask, len(token_ids))
            writer.commit([PendingRecord(f"r{number}", token_ids.numpy(), rows, 8, complete, "length", None, mask)])
        writer.close()
        return path

    return make


@pytest.fixture(scope="session")
def store_path(make_store: StoreMaker, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_store(tmp_path_factory.mktemp("stores") / "store")


@pytest.fixture
def edit_checkpoint(tmp_path: Path, model_folder: Path) -> Callable[..., Path]:
    """A copy of the target with another config or other tensors."""

    def edit(config: Callable[[dict[str, Any]], None], tensors: dict[str, torch.Tensor] | None = None) -> Path:
        folder = tmp_path / "edited"
        folder.mkdir()
        content = json.loads((model_folder / "config.json").read_text())
        config(content)
        (folder / "config.json").write_text(json.dumps(content))
        if tensors is None:
            (folder / "model.safetensors").write_bytes((model_folder / "model.safetensors").read_bytes())
        else:
            save_file(tensors, str(folder / "model.safetensors"))
        return folder

    return edit
