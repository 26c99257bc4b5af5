"""The prompts that a real draft is trained on: different ones, of the kinds held out, with none of what is held out."""

from __future__ import annotations

import functools
import importlib
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.contract.conftest import REPOSITORY


@pytest.fixture
def many_prompts(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(REPOSITORY / "tools")
    return importlib.import_module("many_prompts")


@pytest.fixture
def words(many_prompts: ModuleType) -> Any:
    """Words as the packages have them, half of them held out."""
    prompts = importlib.import_module("prompts")
    return many_prompts.Words(
        nouns=("Penguin", "rainbow", "chocolate bar", "telephone", "bus", "tea", "lamp", "box", "berry"),
        adjectives=("French", "old"),
        verbs=("swap", "run"),
        facts=(prompts.HELD_OUT.sentences[0], "It takes 340 years.", "Owls can not move their eyes."),
        tasks=(*prompts.HELD_OUT.tasks, "returns the square root of x"),
    )


def test_no_prompt_has_a_held_out_word(many_prompts: ModuleType, words: Any) -> None:
    held_out = importlib.import_module("prompts").HELD_OUT
    names = [name for parts in (held_out.topics, held_out.names) for name in parts]
    texts = [text for parts in (held_out.tasks, held_out.sentences, held_out.questions) for text in parts]
    forbidden = [*(name.removeprefix("the ").rstrip("s").lower() for name in names), *map(str.lower, texts)]
    written = "\n".join("\n".join(turns) for turns in many_prompts.write_prompts(words, 3000, seed=1)).lower()
    assert [
        text for text in (*forbidden, "french", "swap", " bus", " tea ", "330", "340", "345") if text in written
    ] == []
    assert all(text in written for text in ("lamps", "berries", "square root of x", "owls can not move"))


def test_all_that_is_held_out_is_known_by_its_words(many_prompts: ModuleType) -> None:
    prompts = importlib.import_module("prompts")
    held_out = list(prompts.prompts(prompts.HELD_OUT))
    assert len(held_out) == 40
    assert [text for text in held_out if not many_prompts.HELD_OUT_WORDS.search(text)] == []


def test_prompts_differ_and_are_the_same_for_one_seed(many_prompts: ModuleType, words: Any) -> None:
    first, same, other = ([*many_prompts.write_prompts(words, 2000, seed)] for seed in (1, 1, 2))
    assert first == same != other
    assert len({turns[0] for turns in first}) == len(first) == 2000


def test_the_kinds_are_drawn_in_about_the_shares_of_the_held_out(many_prompts: ModuleType, words: Any) -> None:
    prompts = importlib.import_module("prompts")
    held_out = prompts.HELD_OUT
    counts = {
        "topic": len(prompts.TOPIC_FORMS) * len(held_out.topics),
        "code": len(prompts.CODE_FORMS) * len(held_out.tasks),
        "rewriting": len(prompts.REWRITING_FORMS) * len(held_out.sentences),
        "arithmetic": len(prompts.ARITHMETIC_FORMS) * len(held_out.names),
        "question": len(held_out.questions),
    }
    writer = many_prompts.Writer(words, seed=0)
    drawn = dict.fromkeys(writer.kinds, 0)

    def count(kind: str) -> str:
        drawn[kind] += 1
        return kind

    writer.kinds = {kind: functools.partial(count, kind) for kind in writer.kinds}
    for _ in range(4000):
        writer.write()
    held_out_shares = {kind: number / sum(counts.values()) for kind, number in counts.items()}
    assert {kind: number / 4000 for kind, number in drawn.items()} == pytest.approx(held_out_shares, abs=0.07)


def test_a_missing_package_is_one_line(
    many_prompts: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "wonderwords", None)
    monkeypatch.setattr(sys, "argv", ["many_prompts.py", str(tmp_path / "train.jsonl")])
    assert many_prompts.main() == 1
    assert capsys.readouterr().err == (
        "wonderwords is not installed; its words are needed: pip install wonderwords==3.0.1 randfacts==0.24.4\n"
    )
    assert list(tmp_path.iterdir()) == []


def test_the_file_is_one_that_prepare_reads(
    many_prompts: ModuleType, words: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "train.jsonl"
    monkeypatch.setattr(many_prompts, "read_words", lambda: words)
    monkeypatch.setattr(sys, "argv", ["many_prompts.py", str(file), "--count", "300"])
    assert many_prompts.main() == 0
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    assert len({line["id"] for line in lines}) == len(lines) == 300
    assert {message["role"] for line in lines for message in line["messages"]} == {"user"}
