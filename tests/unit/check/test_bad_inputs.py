"""Bad inputs: one clear line each on standard error, exit status 1, in less than two seconds."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.unit.check.conftest import KIMI_K25, LLAMA, ReplaceFiles, WriteConfig
from vllm_overlay.check import installation
from vllm_overlay.cli import main

# CPU seconds: beside other work the wall clock tells of that.
LIMIT_S = 2.0


@dataclasses.dataclass(frozen=True)
class Bad:
    """An input, and what the one line must say."""

    says: str
    config: Any = dataclasses.field(default_factory=lambda: dict(LLAMA))
    words: tuple[str, ...] = ()
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)


def changed(**values: Any) -> dict[str, Any]:
    return {**LLAMA, **values}


def without(*names: str) -> dict[str, Any]:
    return {name: value for name, value in LLAMA.items() if name not in names}


BAD = {
    # config.json
    "truncated": Bad("no valid JSON, line 1", json.dumps(LLAMA)[:60]),
    "empty": Bad("no valid JSON, line 1 column 1", ""),
    "a list": Bad("holds a list where a configuration is an object", "[]"),
    "null": Bad("holds nothing where a configuration is an object", "null"),
    "no text": Bad("is not text in UTF-8", b"\xff\xfe\x00"),
    "no architectures": Bad("names no architectures", without("architectures")),
    "empty architectures": Bad("names no architectures", changed(architectures=[])),
    "architectures no list": Bad("'architectures' is \"LlamaForCausalLM\"", changed(architectures="LlamaForCausalLM")),
    "unknown architecture": Bad("did you mean LlamaForCausalLM", changed(architectures=["LamaForCausalLM"])),
    "nothing like it": Bad("Zzz, unknown to this vLLM", changed(architectures=["Zzz"])),
    "no layers": Bad("has no 'num_hidden_layers'", without("num_hidden_layers")),
    "layers as text": Bad("'num_hidden_layers' is \"32\"", changed(num_hidden_layers="32")),
    "layers true": Bad("'num_hidden_layers' is true", changed(num_hidden_layers=True)),
    "zero layers": Bad("'num_hidden_layers' is 0", changed(num_hidden_layers=0)),
    "no hidden size": Bad("has no 'hidden_size'", without("hidden_size")),
    "hidden size a list": Bad("'hidden_size' is [4096]", changed(hidden_size=[4096])),
    "vocabulary negative": Bad("'vocab_size' is -1", changed(vocab_size=-1)),
    "text config a list": Bad("'text_config' holds a list", changed(text_config=[])),
    "text config without layers": Bad(
        "has no 'num_hidden_layers' in 'text_config'", {**KIMI_K25, "text_config": {"hidden_size": 8}}
    ),
    # layers
    "id too high": Bad("layer ids [33] do not exist: this model has ids 0 to 32", words=("--layers", "2,33")),
    "id twice": Bad("name an id twice", words=("--layers", "2,2")),
    "id negative": Bad("hold a negative id", words=("--layers=-1,2",)),
    "ids no numbers": Bad("neither 'eagle3', 'all', nor ids", words=("--layers", "first,last")),
    "ids empty": Bad("neither 'eagle3', 'all', nor ids", words=("--layers", "")),
    "too shallow": Bad("too shallow; name the layers you want", changed(num_hidden_layers=4)),
    # the plan
    "ranks that do not divide": Bad(
        "5 ranks for 32 attention heads; vLLM refuses it: the nearest below is 4", words=("--tensor-parallel-size", "5")
    ),
    "no rank": Bad("found 0; give 1", words=("--tensor-parallel-size", "0")),
    "no token": Bad("a number of tokens above 0, found 0", words=("--tokens", "0")),
    "no space": Bad("GB free", words=("--tokens", str(10**15)), environment={"VLLM_OVERLAY_CAPTURE": "{tmp}/store"}),
    "capture into a file": Bad("is a file", environment={"VLLM_OVERLAY_CAPTURE": "{tmp}/model/config.json"}),
    # settings
    "switch": Bad("VLLM_OVERLAY='yes' is neither 1 (on) nor 0 (off)", environment={"VLLM_OVERLAY": "yes"}),
    "unknown setting": Bad("did you mean VLLM_OVERLAY_TOKENS", environment={"VLLM_OVERLAY_TOKNS": "all"}),
    "fraction": Bad("VLLM_OVERLAY_SAMPLE='2' is not a fraction", environment={"VLLM_OVERLAY_SAMPLE": "2"}),
    "no number": Bad("VLLM_OVERLAY_SAMPLE='half' is not", environment={"VLLM_OVERLAY_SAMPLE": "half"}),
    "layers in the settings": Bad("VLLM_OVERLAY_LAYERS: layers '2,x'", environment={"VLLM_OVERLAY_LAYERS": "2,x"}),
    "ids of the settings": Bad("layer ids [40] do not exist", environment={"VLLM_OVERLAY_LAYERS": "40"}),
    "policy": Bad("VLLM_OVERLAY_POLICY='lax' is not one of", environment={"VLLM_OVERLAY_POLICY": "lax"}),
    "release": Bad("VLLM_OVERLAY_RELEASE='9.9' is not supported", environment={"VLLM_OVERLAY_RELEASE": "9.9"}),
}


class Answer(NamedTuple):
    status: int
    output: str
    problems: list[str]
    seconds: float


def ask(capsys: pytest.CaptureFixture[str], *words: str) -> Answer:
    began = time.process_time()
    status = main(["check", *words])
    seconds = time.process_time() - began
    captured = capsys.readouterr()
    return Answer(status, captured.out, captured.err.splitlines(), seconds)


def expect_one_line(answer: Answer, says: str) -> None:
    assert answer.status == 1
    assert len(answer.problems) == 1, answer.problems
    assert answer.problems[0].startswith("problem: ")
    assert says in answer.problems[0]
    assert answer.output.count("fails  ") == 1
    assert answer.seconds < LIMIT_S


@pytest.mark.parametrize("name", BAD)
def test_a_bad_input_is_one_line(
    name: str,
    write_config: WriteConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    bad = BAD[name]
    folder = write_config(bad.config)
    for variable, value in bad.environment.items():
        monkeypatch.setenv(variable, value.replace("{tmp}", str(tmp_path)))
    expect_one_line(ask(capsys, str(folder), *bad.words), bad.says)


def test_no_such_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expect_one_line(ask(capsys, str(tmp_path / "nowhere")), "name a local model folder, or its config.json")


def test_a_folder_without_a_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expect_one_line(ask(capsys, str(tmp_path)), "is a folder without a config.json")


def test_no_vllm(
    write_config: WriteConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(installation, "find_installed", lambda: None)
    expect_one_line(ask(capsys, str(write_config(LLAMA))), "no vLLM in this environment")


@pytest.mark.parametrize(
    ("version", "says"),
    [
        ("0.9.1", "vLLM 0.9.1 is not a supported release"),
        ("2.0.0", "VLLM_OVERLAY_POLICY=warn to try"),
        ("x", "no version"),
    ],
)
def test_an_unsupported_vllm(
    version: str,
    says: str,
    write_config: WriteConfig,
    replace_files: ReplaceFiles,
    capsys: pytest.CaptureFixture[str],
) -> None:
    replace_files(version=version)
    expect_one_line(ask(capsys, str(write_config(LLAMA))), says)


def test_a_file_of_vllm_that_cannot_be_parsed(
    write_config: WriteConfig, replace_files: ReplaceFiles, capsys: pytest.CaptureFixture[str]
) -> None:
    replace_files({"vllm/model_executor/models/llama.py": "class LlamaForCausalLM(:\n"})
    expect_one_line(ask(capsys, str(write_config(LLAMA))), "vllm/model_executor/models/llama.py:1 cannot be parsed")


def test_a_capture_folder_that_cannot_be_written(
    write_config: WriteConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_config(LLAMA)
    monkeypatch.setenv("VLLM_OVERLAY_CAPTURE", str(tmp_path / "store"))
    # Root, which tests may run as, can write everywhere.
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    expect_one_line(ask(capsys, str(folder)), f"{tmp_path} cannot be; name another folder")


def test_a_disk_that_is_full(
    write_config: WriteConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_config(LLAMA)
    monkeypatch.setenv("VLLM_OVERLAY_CAPTURE", str(tmp_path / "store"))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**12, 10**12 - 10**9, 10**9))
    expect_one_line(ask(capsys, str(folder)), "32.8 GB for 1000000 tokens, found 1.0 GB free")


def test_json_of_a_bad_input_is_json(write_config: WriteConfig, capsys: pytest.CaptureFixture[str]) -> None:
    answer = ask(capsys, str(write_config("{")), "--json")
    assert answer.status == 1
    report = json.loads(answer.output)
    assert report["would_fail"] is True
    assert [line["subject"] for line in report["lines"] if line["verdict"] == "fails"] == ["model"]
