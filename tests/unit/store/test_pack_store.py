"""tools/pack_store.py: what float8 changes in what the target's head says."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.unit.store.conftest import MakeMeta, MakeRecord, MakeRows
from vllm_overlay.store import Store, StoreMeta, StoreWriter

EPS = 1e-5


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(Path(__file__).parents[3] / "tools")
    return importlib.import_module("pack_store")


@pytest.fixture
def store(meta: StoreMeta, make_rows: MakeRows, make_record: MakeRecord, store_path: Path) -> Path:
    """Layers 2, 1 and 6 of 6; a record with a row missing, and one longer than what is read at a time."""
    with StoreWriter.open(store_path, meta) as writer:
        first = writer.append(make_rows(500))
        writer.commit(
            [
                make_record("short", range(first, first + 20)),
                make_record("holed", [first, -1]),
                make_record("long", range(first + 20, first + 500)),
            ]
        )
    return store_path


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model", {})


def write_model(folder: Path, changes: dict[str, int]) -> Path:
    config = {"model_type": "llama", "hidden_size": 8, "num_hidden_layers": 6, "vocab_size": 40, "rms_norm_eps": EPS}
    config |= {"num_attention_heads": 1, "intermediate_size": 8, "tie_word_embeddings": False} | changes
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(7)
    width = config["hidden_size"]
    tensors = {
        "model.norm.weight": torch.rand(width, generator=generator) + 0.5,
        "lm_head.weight": torch.randn(40, width, generator=generator),
        "model.embed_tokens.weight": torch.randn(40, width, generator=generator),
    }
    save_file(tensors, folder / "model.safetensors")
    return folder


def run(tool: ModuleType, monkeypatch: pytest.MonkeyPatch, *words: str | Path) -> int:
    monkeypatch.setattr(sys, "argv", ["pack_store.py", *map(str, words)])
    status: int = tool.main()
    return status


def test_what_the_head_says_of_both_is_compared(
    tool: ModuleType, store: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_rows: MakeRows,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    report = tmp_path / "report.json"
    assert run(tool, monkeypatch, store, "-o", tmp_path / "packed", "--model", model, "--json", report) == 0
    tensors = {name: tensor.double() for name, tensor in load_file(model / "model.safetensors").items()}

    def predict(states: torch.Tensor) -> torch.Tensor:
        normed = states * (states.square().mean(dim=-1, keepdim=True) + EPS).rsqrt() * tensors["model.norm.weight"]
        return (normed @ tensors["lm_head.weight"].T).softmax(dim=-1)

    was = make_rows(500)[:, 2].double()
    now = torch.cat([record.hidden_states for record in Store.open(tmp_path / "packed")])[:, 2].double()
    p, q = predict(was), predict(now)
    same = float((p.argmax(dim=-1) == q.argmax(dim=-1)).double().mean())
    divergence = float((p * (p / q).log()).sum(dim=-1).mean())
    found = json.loads(report.read_text())["head"]
    assert 0.8 < same < 1
    assert found["same first choice"] == same
    assert found["kl"] == pytest.approx(divergence, rel=1e-3)
    said = f"the target's head: the same first choice at {same:.2%} of the positions, KL {found['kl']:.5f}\n"
    assert capsys.readouterr().out.endswith(said)


def test_without_a_model_no_head_is_looked_at(
    tool: ModuleType, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tool, monkeypatch, store, "-o", tmp_path / "packed") == 0
    assert "head" not in capsys.readouterr().out


def test_a_store_without_the_last_layer_is_refused_before_anything_is_packed(
    tool: ModuleType, make_meta: MakeMeta, make_rows: MakeRows, make_record: MakeRecord, store_path: Path, model: Path,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    with StoreWriter.open(store_path, make_meta(layer_ids=(2, 1, 5))) as writer:
        writer.commit([make_record("a", [writer.append(make_rows(1))])])
    assert run(tool, monkeypatch, store_path, "-o", tmp_path / "packed", "--model", model) == 1
    assert capsys.readouterr().err == f"{store_path} has layers [2, 1, 5], without 6, the last\n"
    assert not (tmp_path / "packed").exists()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [({"num_hidden_layers": 5}, "its layers 5, not 6"), ({"hidden_size": 4}, "its hidden size 4, not 8")],
)
def test_another_target_is_refused_before_anything_is_packed(
    changes: dict[str, int], reason: str, tool: ModuleType, store: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    other = write_model(tmp_path / "other", changes)
    assert run(tool, monkeypatch, store, "-o", tmp_path / "packed", "--model", other) == 1
    assert capsys.readouterr().err == f"{other} is not the target of {store}: {reason}\n"
    assert not (tmp_path / "packed").exists()
