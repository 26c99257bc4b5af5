"""Model configurations, and the installed vLLM with files of it replaced in memory."""

from __future__ import annotations

import dataclasses
import json
from collections import ChainMap
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from vllm_overlay.check import report
from vllm_overlay.source.vllm_source import VllmSource, find_installed, read_folder

LLAMA: Mapping[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "vocab_size": 128256,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}

DEEPSEEK: Mapping[str, Any] = {
    "model_type": "deepseek_v3",
    "num_hidden_layers": 61,
    "hidden_size": 7168,
    "vocab_size": 129280,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "n_routed_experts": 256,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
}

# The shape of the published one.
KIMI_K25: Mapping[str, Any] = {
    "architectures": ["KimiK25ForConditionalGeneration"],
    "model_type": "kimi_k25",
    "vision_config": {"model_type": "kimi_k25_vision", "num_hidden_layers": 27, "hidden_size": 1152},
    "text_config": {**DEEPSEEK, "architectures": ["DeepseekV3ForCausalLM"], "model_type": "kimi_k2"},
}

WriteConfig = Callable[[Any], Path]
ReplaceFiles = Callable[..., None]


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No variable of ours, or of vLLM's, that the tests were started with."""
    for name in ("VLLM_OVERLAY", "VLLM_OVERLAY_CAPTURE", "VLLM_OVERLAY_LAYERS", "VLLM_PLUGINS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)


@pytest.fixture
def write_config(tmp_path: Path) -> WriteConfig:
    """Write a model folder with this config.json: an object, or the text or bytes of the file."""

    def write(config: Any) -> Path:
        folder = tmp_path / "model"
        folder.mkdir()
        data = config if isinstance(config, str | bytes) else json.dumps(config)
        (folder / "config.json").write_bytes(data if isinstance(data, bytes) else data.encode())
        return folder

    return write


@pytest.fixture(scope="session")
def installed() -> VllmSource:
    folder = find_installed()
    assert folder is not None
    return read_folder(folder)


@pytest.fixture
def replace_files(installed: VllmSource, monkeypatch: pytest.MonkeyPatch) -> ReplaceFiles:
    """Have the command see the installed vLLM with some files replaced, or with another version."""

    def replace(files: Mapping[str, str] | None = None, **facts: str) -> None:
        changed = ChainMap(dict(files or {}), installed.files)  # type: ignore[arg-type]
        source = dataclasses.replace(installed, files=changed, **facts)
        monkeypatch.setattr(report, "read_installation", lambda: source)

    return replace
