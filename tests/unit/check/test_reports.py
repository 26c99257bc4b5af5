"""What the report says of architectures of many forms, on whichever release is installed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import pytest

from tests.unit.check.conftest import DEEPSEEK, KIMI_K25, LLAMA, ReplaceFiles, WriteConfig
from vllm_overlay.check import installation
from vllm_overlay.check.line import Line
from vllm_overlay.check.report import Plan, Report, check, write_report
from vllm_overlay.source.definitions import Definitions
from vllm_overlay.source.registry import read_registry
from vllm_overlay.source.vllm_source import VllmSource

P_H_R = "(positions, hidden_states, residual"
P_H = "(positions, hidden_states)"


class Known(NamedTuple):
    """What is the same in every release that has the architecture natively. `outputs`: values that a layer returns."""

    architecture: str
    layer: str
    parameters: str = P_H_R
    outputs: int = 2
    path: str = "model.layers"
    style: str = "by position"
    config: Mapping[str, Any] = LLAMA


GPT2 = {"n_layer": 12, "n_embd": 768, "n_head": 12, "vocab_size": 50257}
GEMMA3 = {"text_config": {"model_type": "gemma3_text", "num_hidden_layers": 34, "hidden_size": 2560}}
TEXT_INSIDE = "language_model.model.layers"

KNOWN = (
    Known("LlamaForCausalLM", "LlamaDecoderLayer"),
    Known("Qwen2ForCausalLM", "Qwen2DecoderLayer"),
    Known("Qwen3ForCausalLM", "Qwen3DecoderLayer"),
    Known("Qwen3MoeForCausalLM", "Qwen3MoeDecoderLayer"),
    Known("MixtralForCausalLM", "MixtralDecoderLayer"),
    Known("GptOssForCausalLM", "TransformerBlock", "(hidden_states, positions, residual"),
    Known("Gemma2ForCausalLM", "Gemma2DecoderLayer"),
    Known("Phi3ForCausalLM", "LlamaDecoderLayer"),
    Known("GraniteForCausalLM", "GraniteDecoderLayer", P_H, 1),
    Known("FalconForCausalLM", "FalconDecoderLayer", P_H, 1, "transformer.h"),
    Known("OPTForCausalLM", "OPTDecoderLayer", "(hidden_states)", 1, "model.decoder.layers"),
    Known("Mamba2ForCausalLM", "Mamba2DecoderLayer", "(hidden_states, residual", 2, "backbone.layers", "by keyword"),
    Known("DeepseekV3ForCausalLM", "DeepseekV2DecoderLayer"),
    Known("Olmo2ForCausalLM", "Olmo2DecoderLayer", P_H, 1),
    Known("GPT2LMHeadModel", "GPT2Block", "(hidden_states)", 1, "transformer.h", config=GPT2),
    Known("Qwen2VLForConditionalGeneration", "Qwen2DecoderLayer", path=TEXT_INSIDE),
    Known("Gemma3ForConditionalGeneration", "Gemma3DecoderLayer", path=TEXT_INSIDE, config=GEMMA3),
    Known("KimiK25ForConditionalGeneration", "DeepseekV2DecoderLayer", path=TEXT_INSIDE, config=KIMI_K25),
)


@pytest.fixture(scope="module")
def registered(installed: VllmSource) -> Any:
    return read_registry(Definitions(installed)).entries


def find(report: Report, subject: str) -> Line:
    (line,) = [line for line in report.lines if line.subject == subject]
    return line


@pytest.mark.parametrize("known", KNOWN, ids=lambda known: known.architecture)
def test_layers_are_found_and_described(known: Known, write_config: WriteConfig, registered: Any) -> None:
    if known.architecture not in registered:
        pytest.skip("this vLLM does not have it")
    config = {**known.config, "architectures": [known.architecture]}
    report = check(Plan(write_config(config)), {})
    assert report.failing == []
    if registered[known.architecture].module.endswith(".transformers"):
        line = find(report, "architecture")
        assert (line.verdict, "Transformers backend" in line.found) == ("warning", True)
        return
    line = find(report, "decoder layers")
    assert re.fullmatch(rf"{known.path} in \w+: {known.layer} at vllm/\S+\.py:\d+", line.found)
    call = find(report, "layer call")
    assert f"{known.style}; the layer takes {known.parameters}" in call.found
    assert find(report, "layer output").found.count(",") == known.outputs - 1
    assert find(report, "embedding method").verdict != "fails"


def test_the_whole_of_a_report(write_config: WriteConfig) -> None:
    report = check(Plan(write_config(LLAMA), num_tokens=2_000_000), {})
    subjects = [line.subject for line in report.lines]
    assert subjects == [
        "model",
        "layers",
        "tensor parallel size",
        "rows",
        "disk",
        "host memory",
        "settings",
        "vLLM",
        "torch",
        "transformers",
        "safetensors",
        "architecture",
        "embedding method",
        "EAGLE-3 serving",
        "decoder layers",
        "layer call",
        "layer output",
        "model runner",
        "prefix caching",
        "chunked prefill",
        "patches",
    ]
    assert find(report, "layers").found == "eagle3: 2, 16, 29, 32"
    assert find(report, "rows").found == "4 layers x 4096 x 2 bytes = 32768 bytes a token"
    assert find(report, "disk").expected == "65.5 GB for 2000000 tokens"
    assert find(report, "tensor parallel size").found == "1: 32 of 32 attention heads a rank, 8 of 8 KV heads"
    assert find(report, "EAGLE-3 serving").verdict == "ok"
    assert find(report, "prefix caching").found.startswith(("on by default: rows", "settled by the engine by default"))
    text = list(write_report(report))
    assert text[0].startswith("ok       model")
    assert max(map(len, text)) <= 120


def test_rows_in_8_bits_take_half_the_disk(write_config: WriteConfig) -> None:
    report = check(Plan(write_config(LLAMA), num_tokens=2_000_000), {"VLLM_OVERLAY_DTYPE": "fp8"})
    assert find(report, "rows").found == "4 layers x (4096 + 4) bytes = 16400 bytes a token"
    assert find(report, "disk").expected == "32.8 GB for 2000000 tokens"


def test_a_config_file_does_for_a_folder(write_config: WriteConfig) -> None:
    report = check(Plan(write_config(LLAMA) / "config.json", layers="32,0"), {})
    assert report.failing == []
    assert find(report, "layers").found == "32, 0"


def test_what_the_story_asks_of_deepseek(write_config: WriteConfig, registered: Any) -> None:
    """CASES 21 to 24: the class under the name it has, scoring_func there, llama_4_scaling absent and defaulted."""
    name = "KimiK25ForConditionalGeneration"
    config = KIMI_K25 if name in registered else {**DEEPSEEK, "architectures": ["DeepseekV3ForCausalLM"]}
    report = check(Plan(write_config(config)), {})
    assert report.failing == []
    assert find(report, "DeepSeek class").found.startswith("DeepseekV2Model in vllm.model_executor.models.deepseek_v2")
    assert find(report, "scoring_func").found == "'sigmoid'"
    scaling = find(report, "llama_4_scaling")
    assert scaling.verdict == "ok"
    assert scaling.found.startswith("absent in config.json")
    assert find(report, "layers").found == "eagle3: 2, 30, 58, 61"
    assert find(report, "rows").found.endswith("= 57344 bytes a token")


def test_scoring_func_that_is_missing_is_said(write_config: WriteConfig) -> None:
    config = {name: value for name, value in DEEPSEEK.items() if name != "scoring_func"}
    report = check(Plan(write_config({**config, "architectures": ["DeepseekV3ForCausalLM"]})), {})
    line = find(report, "scoring_func")
    assert (line.verdict, line.found) == ("warning", "absent")


def test_a_newer_vllm_is_tried_under_the_policy_and_said(
    write_config: WriteConfig, replace_files: ReplaceFiles
) -> None:
    replace_files(version="0.99.0")
    report = check(Plan(write_config(LLAMA)), {"VLLM_OVERLAY_POLICY": "warn"})
    line = find(report, "vLLM")
    assert (line.verdict, "0.99.0" in line.found) == ("warning", True)


def test_a_filter_of_plugins_that_leaves_us_out_is_said(write_config: WriteConfig) -> None:
    folder = write_config(LLAMA)
    line = find(check(Plan(folder), {"VLLM_PLUGINS": "other"}), "plug-ins")
    assert (line.verdict, "add vllm_overlay" in line.advice) == ("warning", True)
    assert find(check(Plan(folder), {"VLLM_PLUGINS": "other, vllm_overlay"}), "plug-ins").verdict == "ok"


def test_a_capture_folder_without_the_switch_is_said(write_config: WriteConfig, tmp_path: Any) -> None:
    folder = write_config(LLAMA)
    line = find(check(Plan(folder), {"VLLM_OVERLAY_CAPTURE": str(tmp_path / "s")}), "settings")
    assert (line.verdict, line.advice) == ("warning", "nothing is captured without VLLM_OVERLAY=1")


def test_an_old_safetensors_is_said(write_config: WriteConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installation, "_SAVES_ALONE", "safetensors>=99")
    line = find(check(Plan(write_config(LLAMA)), {}), "safetensors")
    assert (line.verdict, "it holds the interpreter while it saves" in line.advice) == ("warning", True)


def test_a_package_outside_what_vllm_requires_is_said(
    write_config: WriteConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(installation, "find_requirement", lambda requirements, name: f"{name}<0.1")
    report = check(Plan(write_config(LLAMA)), {})
    assert report.failing == []
    line = find(report, "transformers")
    assert (line.verdict, line.expected) == ("warning", "transformers<0.1, as this vLLM requires")
