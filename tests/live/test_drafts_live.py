"""Exported drafts of every form, loaded by vLLM's own draft class. No engine: it is vLLM's loader that is asked.

vLLM raises at a tensor that it has no place for, and says nothing of a parameter that no tensor fills: what it holds
afterwards is compared with the file, name by name.
"""

from __future__ import annotations

from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from packaging.specifiers import SpecifierSet
from safetensors.torch import load_file

from tests.live.runs import Reference, make_prompt, run_python
from tests.tiny_models import VOCAB_SIZE, write_tiny_llama
from vllm_overlay.eagle3.export import export_run
from vllm_overlay.eagle3.ranks import alone
from vllm_overlay.eagle3.settings import Settings
from vllm_overlay.eagle3.training import train
from vllm_overlay.store import PendingRecord, StoreMeta, StoreWriter

pytestmark = pytest.mark.live

SCRIPT = Path(__file__).parent / "scripts" / "load_drafts.py"
VLLM = metadata.version(metadata.packages_distributions()["vllm"][0])
LAYERS, HIDDEN = 4, 128
LAYER_IDS = (1, 2, 3, LAYERS)

# By name: what the draft is trained with, the format, and the releases whose draft class has a place for it.
FORMS: dict[str, tuple[dict[str, Any], str, SpecifierSet]] = {
    "reduced vocabulary": ({}, "vllm", SpecifierSet()),
    "reduced vocabulary, speculators' format": ({}, "speculators", SpecifierSet()),
    "whole vocabulary": ({"draft_vocab_size": VOCAB_SIZE}, "vllm", SpecifierSet()),
    "narrow": ({"hidden_size": 64}, "vllm", SpecifierSet()),
    "norm_before_fc": ({"norm_before_fc": True}, "vllm", SpecifierSet(">=0.18")),
    "fc_norm": ({"fc_norm": True, "norm_output": True}, "vllm", SpecifierSet(">=0.22")),
    "qwen3": ({"style": "qwen3"}, "vllm", SpecifierSet(">=0.24")),
}
HERE = [name for name, (_, _, releases) in FORMS.items() if VLLM in releases]


def write_store(folder: Path, model: Path) -> Path:
    """The states of eight random texts."""
    reference = Reference(model)
    meta = StoreMeta(LAYER_IDS, HIDDEN, "float32", LAYERS, str(model), "tiny", VLLM, "V1")
    with StoreWriter.open(folder, meta) as writer:
        for number in range(8):
            token_ids = torch.tensor(make_prompt(number, 24))
            first = writer.append(reference.states(token_ids)[:, list(LAYER_IDS)].contiguous())
            rows = np.arange(first, first + len(token_ids), dtype=np.int64)
            writer.commit([PendingRecord(f"r{number}", token_ids.numpy(), rows, 8, True, "length", None, None)])
    return folder


@pytest.fixture(scope="module")
def drafts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By form, the exported draft, and beside its tensors what vLLM made of them."""
    folder = tmp_path_factory.mktemp("drafts")
    model = write_tiny_llama(folder / "model", layers=LAYERS, spread=0.05)
    store = write_store(folder / "store", model)
    exported = {}
    for number, name in enumerate(HERE):
        changes, form, _ = FORMS[name]
        settings = Settings(**{"features": LAYER_IDS[:3], "draft_vocab_size": 16, "steps": 2, "holdout": 0, **changes})
        run = folder / f"run-{number}"
        train([store], model, run, settings, ranks=alone("cpu"), self_test="off")
        exported[name] = export_run(run, folder / f"draft-{number}", checkpoint="last", format=form)
    done = run_python([str(SCRIPT), str(model), *map(str, exported.values())], {"OMP_NUM_THREADS": "2"})
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-5000:]
    return exported


# vLLM's layer multiplies by these at once.
STACKED = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
}
# vLLM maps ids from the draft's to the target's only, and takes embeddings that are not in the file from the target.
UNUSED, THE_TARGETS = "t2d", "model.embed_tokens.weight"
OFFSETS = "draft_id_to_target_id"


def place(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of an exported file by the names of vLLM's parameters."""
    left = {name.replace("midlayer", "layers.0"): tensor for name, tensor in tensors.items() if name != UNUSED}
    placed = {
        f"model.layers.0.{name}.weight": torch.cat([left.pop(f"layers.0.{part}.weight") for part in parts])
        for name, parts in STACKED.items()
    }
    own = {"d2t": OFFSETS, "lm_head.weight": "lm_head.weight"}
    return placed | {own.get(name, f"model.{name}"): tensor for name, tensor in left.items()}


@pytest.mark.parametrize("form", HERE)
def test_every_tensor_is_a_parameter_and_every_parameter_a_tensor(drafts: dict[str, Path], form: str) -> None:
    """CASES 34: nothing missing, nothing unexpected, and each value where it belongs."""
    expected = place(load_file(str(drafts[form] / "model.safetensors")))
    loaded = load_file(str(drafts[form] / "loaded.safetensors"))
    if THE_TARGETS not in expected:
        del loaded[THE_TARGETS]
    if OFFSETS not in expected:  # most releases keep a map of the whole vocabulary too: every id is itself
        assert not loaded.pop(OFFSETS, torch.zeros(1)).any()
    assert loaded.keys() == expected.keys()
    for name, tensor in expected.items():
        assert len(tensor.unique()) > 1, f"{name} could be what vLLM began with"
        # vLLM pads vocabularies to a multiple of 64.
        assert torch.equal(loaded[name][: len(tensor)], tensor), name
