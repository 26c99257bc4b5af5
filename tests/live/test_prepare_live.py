"""`prepare --regenerate` on a real engine."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import numpy as np
import pytest

from tests.tiny_models import END_OF_TURN, tiny_tokenizer, write_tiny_llama
from vllm_overlay.errors import OverlayError

pytestmark = pytest.mark.live
pytest.importorskip("vllm")

ENGINE = ["--dtype", "float32", "--enforce-eager", "--max-model-len", "256"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("llama"))


def test_the_target_writes_the_answers(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import psutil
    import torch
    from transformers import AutoModelForCausalLM

    from vllm_overlay.cli import prepare
    from vllm_overlay.dataset import Dataset

    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", os.environ.get("VLLM_CPU_KVCACHE_SPACE", "1"))
    questions = [["What is 2 + 2?", "And 3 + 3?"], ["Hi"], ["a" * 300], ["Say it", "again", "and again"]]
    file = tmp_path / "chats.jsonl"
    lines = [{"messages": [{"role": "user", "content": text} for text in texts]} for texts in questions]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    before = {child.pid for child in psutil.Process().children(recursive=True)}

    parser = argparse.ArgumentParser()
    prepare.add_arguments(parser)
    words = [str(file), "--model", str(model), "-o", str(tmp_path / "d"), "--regenerate", "--max-tokens", "12"]
    args = parser.parse_args(words)
    args.engine_options = ENGINE
    assert prepare.run(args) == 0

    after = [child for child in psutil.Process().children(recursive=True) if child.pid not in before]
    # Python's own resource tracker lives as long as the program that first spawned a process.
    assert [child for child in after if "resource_tracker" not in " ".join(child.cmdline())] == []

    dataset = Dataset.open(tmp_path / "d")
    assert [item.key for item in dataset] == ["chats:1", "chats:2", "chats:4"]  # the third does not fit
    assert dataset.meta["regenerated"] is True
    assert dataset.meta["engine_options"] == ENGINE
    tokenizer = tiny_tokenizer()
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    for item, texts in zip(dataset, (questions[0], questions[1], questions[3]), strict=True):
        turns = np.flatnonzero(np.diff(item.loss_mask.astype(int)) == 1) + 1
        assert len(turns) == len(texts)
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": texts[0]}], tokenize=True, add_generation_prompt=True, return_dict=True
        )
        assert item.token_ids[: turns[0]].tolist() == prompt["input_ids"]
        # Every token in the mask is the target's own greedy choice after exactly these tokens.
        with torch.no_grad():
            logits = reference(torch.from_numpy(item.token_ids)[None]).logits[0]  # [T, 128]
        best = logits[:-1].argmax(-1).numpy()
        where = np.flatnonzero(item.loss_mask)
        assert best[where - 1].tolist() == item.token_ids[where].tolist()
        assert len(set(item.token_ids[where].tolist())) > 3  # not one token over and over
        for turn in turns:
            answer = item.token_ids[turn:][: np.argmin([*item.loss_mask[turn:], False])]
            assert len(answer) == 12 or answer[-1] == END_OF_TURN


def test_options_are_vllms_own() -> None:
    from vllm_overlay.offline.engine import parse_options

    assert parse_options(ENGINE) == {"dtype": "float32", "enforce_eager": True, "max_model_len": 256}
    assert parse_options([]) == {}
    for words, says in (
        (["--no-such-option", "1"], "--no-such-option"),
        (["--max-model-len", "many"], "--max-model-len"),
        (["stray"], "stray"),
        (["--model", "x"], "our own --model"),
    ):
        with pytest.raises(OverlayError) as raised:
            parse_options(words)
        assert says in str(raised.value)
        assert "\n" not in str(raised.value)
