"""`vllm-overlay prepare` without --regenerate: no vLLM involved."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiny_models import tiny_tokenizer
from vllm_overlay.cli import prepare
from vllm_overlay.dataset import Dataset
from vllm_overlay.errors import OverlayError


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny_tokenizer().save_pretrained(folder)
    return folder


def run(*words: str | Path, engine_options: tuple[str, ...] = ()) -> int:
    parser = argparse.ArgumentParser()
    prepare.add_arguments(parser)
    args = parser.parse_args([str(word) for word in words])
    args.engine_options = list(engine_options)
    return prepare.run(args)


def chats(path: Path, *answers: str) -> Path:
    turns = [[{"role": "user", "content": "Hi"}, {"role": "assistant", "content": answer}] for answer in answers]
    path.write_text("".join(json.dumps({"messages": turn}) + "\n" for turn in turns))
    return path


def test_dataset_and_summary(tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, output = chats(tmp_path / "c.jsonl", "yes", "no"), tmp_path / "d"
    for _ in range(2):  # the same command again changes nothing
        assert run(file, "--model", model, "-o", output) == 0
        out = capsys.readouterr().out
    # 20 tokens before each answer: <|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n
    assert out == f"{output}: 2 conversations, 51 tokens, of which 7 are the assistant's (13.7%).\n"
    dataset = Dataset.open(output)
    assert [item.key for item in dataset] == ["c:1", "c:2"]
    assert tiny_tokenizer().decode(dataset[0].token_ids[dataset[0].loss_mask]) == "yes<|im_end|>"
    assert dataset.meta["model"] == str(model)
    assert dataset.meta["regenerated"] is False
    assert len(dataset.meta["tokenizer_sha256"]) == 64
    with pytest.raises(OverlayError, match="other input"):
        run(chats(file, "yes", "No"), "--model", model, "-o", output)


def test_max_length_cuts_and_drops(tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = chats(tmp_path / "c.jsonl", "yes", "yes and much more")
    with file.open("a") as lines:
        turns = [{"role": "user", "content": "Hi" * 40}, {"role": "assistant", "content": "x"}]
        lines.write(json.dumps({"messages": turns}) + "\n")
    assert run(file, "--model", model, "-o", tmp_path / "d", "--max-length", "30") == 0
    assert "1 longer conversation was cut. 1 was dropped" in capsys.readouterr().out
    assert [(item.key, len(item.token_ids)) for item in Dataset.open(tmp_path / "d")] == [("c:1", 26), ("c:2", 30)]
    with pytest.raises(OverlayError, match="no conversation has an answer within 9 tokens"):
        run(file, "--model", model, "-o", tmp_path / "e", "--max-length", "9")


def test_errors_leave_nothing(tmp_path: Path, model: Path) -> None:
    file, output = chats(tmp_path / "c.jsonl", "yes"), tmp_path / "d"
    with pytest.raises(OverlayError, match="only with --regenerate"):
        run(file, "--model", model, "-o", output, engine_options=("--dtype", "float32"))
    with pytest.raises(OverlayError, match="its tokenizer does not load"):
        run(file, "--model", tmp_path / "none", "-o", output)
    (tmp_path / "bare").mkdir()
    tiny_tokenizer(None).save_pretrained(tmp_path / "bare")
    with pytest.raises(OverlayError, match="has no chat template"):
        run(file, "--model", tmp_path / "bare", "-o", output)
    assert not output.exists()


def test_importing_the_command_is_light() -> None:
    heavy = "{'torch', 'vllm', 'transformers', 'numpy'} & set(sys.modules)"
    code = f"import sys, vllm_overlay.cli.prepare; assert not {heavy}, sorted({heavy})"
    subprocess.run([sys.executable, "-c", code], check=True)
