"""What a config.json leaves to its class is asked for in another process, and joined with what is in the file."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from vllm_overlay.rehearsal import defaults
from vllm_overlay.rehearsal.defaults import DefaultsError, complete, read_defaults
from vllm_overlay.rehearsal.shrink import shrink

# As google/gemma-3-4b-it publishes it: neither heads, nor a vocabulary, nor kinds of layers.
GEMMA_3: dict[str, Any] = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "model_type": "gemma3",
    "image_token_index": 262144,
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "sliding_window": 1024,
    },
    "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model", "num_hidden_layers": 27},
}
OF_CLASS: dict[str, Any] = {
    **GEMMA_3["text_config"],
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 262208,
    "attention_dropout": 0.0,
    "layer_types": [("full" if layer % 6 == 5 else "sliding") + "_attention" for layer in range(34)],
}


def replace_python(monkeypatch: pytest.MonkeyPatch, folder: Path, text: str) -> None:
    program = folder / "python"
    program.write_text(f"#!{sys.executable}\nimport os, sys, time\nmodel, file, trust = sys.argv[3:]\n{text}\n")
    program.chmod(0o755)
    monkeypatch.setattr(defaults.sys, "executable", str(program))


def test_kinds_and_sizes_are_added() -> None:
    whole = complete(GEMMA_3, OF_CLASS)
    added = {name: value for name, value in whole["text_config"].items() if name not in GEMMA_3["text_config"]}
    wanted = ("num_attention_heads", "num_key_value_heads", "vocab_size", "layer_types")
    assert added == {name: OF_CLASS[name] for name in wanted}
    small = shrink(whole)
    assert small.layers == tuple(range(6))
    text = small.config["text_config"]
    assert text["layer_types"] == ["sliding_attention"] * 5 + ["full_attention"]
    assert (text["num_attention_heads"], text["num_key_value_heads"], text["vocab_size"]) == (4, 2, 512)


def test_what_is_in_the_file_counts() -> None:
    file = {"num_hidden_layers": 34, "hidden_size": 64, "n_head": 2, "layer_types": ["full"] * 34}
    whole = complete(file, OF_CLASS)
    assert whole["layer_types"] == ["full"] * 34
    assert "num_attention_heads" not in whole


def test_a_class_with_other_layers_is_not_believed() -> None:
    with pytest.raises(DefaultsError, match="its class has 34 layers where the file has 8"):
        complete({"num_hidden_layers": 8, "hidden_size": 64}, OF_CLASS)


def test_the_process_is_told_the_model(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_OVERLAY", "1")
    answers = """
inside = os.environ["HF_MODULES_CACHE"].startswith(os.path.dirname(model))
told = (open(model + "/config.json").read(), trust, os.environ.get("VLLM_OVERLAY"), inside)
import json; json.dump({"told": told}, open(file, "w"))
"""
    replace_python(monkeypatch, folder, answers)
    told = read_defaults({"a": 1}, None, 60.0)["told"]
    assert told == ['{\n "a": 1\n}', "not-trusted", None, True]
    assert read_defaults({}, folder / "code", 60.0)["told"][1] == "trusted"
    assert [one.name for one in folder.iterdir()] == ["python"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("print('many'); raise ValueError('no such model')", "ValueError: no such model"),
        ("sys.exit(3)", "status 3"),
        ("time.sleep(600)", "no answer in 2 s"),
    ],
)
def test_no_answer(text: str, message: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replace_python(monkeypatch, folder, text)
    with pytest.raises(DefaultsError, match=message):
        read_defaults({}, None, 2.0)
    assert [one.name for one in folder.iterdir()] == ["python"]
