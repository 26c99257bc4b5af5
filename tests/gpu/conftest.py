"""A random target of the shapes of Llama-3.1-8B, and a store of random states: what training reads of them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from vllm_overlay.store import PendingRecord, StoreMeta, StoreWriter

SHAPES = Path(__file__).with_name("llama_8b")
RECORDS, LENGTH = 96, 1024
LAYER_IDS = (2, 16, 29, 32)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def store(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_states(tmp_path_factory.mktemp("store") / "store", model)


def write_model(folder: Path) -> Path:
    """Its two ends and its last layer, into a folder that is there."""
    shutil.copy(SHAPES / "config.json", folder)
    facts = json.loads((folder / "config.json").read_text())
    hidden, wide, layer = facts["hidden_size"], facts["intermediate_size"], facts["num_hidden_layers"] - 1
    kv = facts["num_key_value_heads"] * facts["head_dim"]
    shapes = {
        "model.embed_tokens": (facts["vocab_size"], hidden),
        "lm_head": (facts["vocab_size"], hidden),
        f"model.layers.{layer}.self_attn.q_proj": (hidden, hidden),
        f"model.layers.{layer}.self_attn.k_proj": (kv, hidden),
        f"model.layers.{layer}.self_attn.v_proj": (kv, hidden),
        f"model.layers.{layer}.self_attn.o_proj": (hidden, hidden),
        f"model.layers.{layer}.mlp.gate_proj": (wide, hidden),
        f"model.layers.{layer}.mlp.up_proj": (wide, hidden),
        f"model.layers.{layer}.mlp.down_proj": (hidden, wide),
    }
    generator = torch.Generator("cuda").manual_seed(0)
    tensors = {
        f"{name}.weight": (0.02 * torch.randn(shape, generator=generator, device="cuda")).bfloat16().cpu()
        for name, shape in shapes.items()
    }
    norms = ["model.norm", *(f"model.layers.{layer}.{name}_layernorm" for name in ("input", "post_attention"))]
    tensors |= {f"{name}.weight": torch.ones(hidden, dtype=torch.bfloat16) for name in norms}
    save_file(tensors, str(folder / "model.safetensors"))
    return folder


def write_states(path: Path, model: Path) -> Path:
    """A store of random states; a few hundred tokens, so that the draft has something to learn."""
    facts = json.loads((model / "config.json").read_text())
    hidden, layers = facts["hidden_size"], facts["num_hidden_layers"]
    meta = StoreMeta(LAYER_IDS, hidden, "bfloat16", layers, "random", "random", "0.0.0", "V2")
    writer = StoreWriter.open(path, meta)
    generator = torch.Generator("cuda").manual_seed(1)
    for number in range(RECORDS):
        length = LENGTH - number % 7 * 32  # unequal, so that a mean of means would show
        states = torch.randn(length, len(LAYER_IDS), hidden, generator=generator, device="cuda").bfloat16().cpu()
        first = writer.append(states)
        token_ids = torch.randint(0, 500, (length,), generator=generator, device="cuda").cpu().numpy()
        rows = np.arange(first, first + length, dtype=np.int64)
        writer.commit([PendingRecord(f"r{number}", token_ids, rows, 64, True, "length", None, None)])
    writer.close()
    return path
