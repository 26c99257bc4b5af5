from __future__ import annotations

import json
from pathlib import Path

import pytest

from vllm_overlay.dataset.conversations import read_conversations
from vllm_overlay.errors import OverlayError


def write(path: Path, *lines: object) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


CHAT = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]}


def test_messages_ids_and_default_keys(tmp_path: Path) -> None:
    file = write(tmp_path / "chats.jsonl", CHAT, "", {**CHAT, "id": "mine"}, {**CHAT, "id": 7})
    found = read_conversations([file])
    assert [c.key for c in found] == ["chats:1", "mine", "7"]
    assert [c.place for c in found] == [f"{file}:1", f"{file}:3", f"{file}:4"]
    assert list(found[0].messages) == CHAT["messages"]


def test_sharegpt_roles(tmp_path: Path) -> None:
    turns = [("system", "s"), ("human", "h"), ("gpt", "g"), ("user", "u"), ("assistant", "a"), ("tool", "t")]
    file = write(tmp_path / "s.jsonl", {"conversations": [{"from": who, "value": text} for who, text in turns]})
    (found,) = read_conversations([file])
    assert [(m["role"], m["content"]) for m in found.messages] == [
        ("system", "s"),
        ("user", "h"),
        ("assistant", "g"),
        ("user", "u"),
        ("assistant", "a"),
        ("tool", "t"),
    ]


def test_other_fields_of_a_turn_reach_the_template(tmp_path: Path) -> None:
    turn = {"role": "assistant", "content": "x", "reasoning_content": "y"}
    (found,) = read_conversations([write(tmp_path / "c.jsonl", {"messages": [turn]})])
    assert found.messages[0] == turn


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{not json", "is not JSON"),
        ("[1]", "JSON list"),
        ({"text": "x"}, 'neither "messages" nor "conversations" (it has: text)'),
        ({"messages": []}, "is empty"),
        ({"messages": "x"}, "not a list"),
        ({"messages": [{"content": "x"}]}, 'no "role"'),
        ({"messages": [{"role": "human", "content": "x"}]}, "'human', which is none of"),
        ({"conversations": [{"from": "alien", "value": "x"}]}, "'alien', which is none of"),
        ({"messages": [{"role": "user", "content": None}]}, 'no text in "content"'),
        ({"messages": [{"role": "assistant", "content": "", "tool_calls": [1]}]}, '"tool_calls"'),
        ({**CHAT, "id": [1]}, '"id" is [1]'),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: object, says: str) -> None:
    file = write(tmp_path / "bad.jsonl", CHAT, line)
    with pytest.raises(OverlayError) as raised:
        read_conversations([file])
    assert str(raised.value).startswith(f"{file}:2: ")
    assert says in str(raised.value)
    assert "\n" not in str(raised.value)


def test_empty_missing_and_not_text(tmp_path: Path) -> None:
    with pytest.raises(OverlayError, match=r"empty\.jsonl: no conversation"):
        read_conversations([write(tmp_path / "good.jsonl", CHAT), write(tmp_path / "empty.jsonl", "")])
    with pytest.raises(OverlayError, match=r"none\.jsonl: No such file"):
        read_conversations([tmp_path / "none.jsonl"])
    (tmp_path / "latin.jsonl").write_bytes(b'{"messages": "\xe9"}\n')
    with pytest.raises(OverlayError, match=r"latin\.jsonl: is not UTF-8"):
        read_conversations([tmp_path / "latin.jsonl"])


def test_a_key_twice_names_both_places(tmp_path: Path) -> None:
    file = write(tmp_path / "c.jsonl", {**CHAT, "id": "x"}, {**CHAT, "id": "x"})
    with pytest.raises(OverlayError, match=rf"c\.jsonl:2: the id 'x' is that of {file}:1 already"):
        read_conversations([file])
