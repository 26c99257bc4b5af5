"""Chat files, one conversation a line.

Two layouts are read: `{"messages": [{"role": ..., "content": ...}]}` (OpenAI's) and `{"conversations": [{"from": ...,
"value": ...}]}` (ShareGPT's). Either may have an `"id"`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_overlay.errors import OverlayError

ROLES = ("system", "developer", "user", "assistant", "tool")

SHAREGPT_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "model": "assistant",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
}


@dataclass(frozen=True)
class Conversation:
    """One conversation: `messages` as a chat template takes them, `place` is `file:line` for error messages."""

    key: str
    place: str
    messages: tuple[dict[str, Any], ...]


def read_conversations(files: Sequence[Path]) -> list[Conversation]:
    """All conversations of `files`, in order; the key is the line's id, or `<file stem>:<line>`.

    Raises OverlayError, naming file and line, for a line that is not a conversation, for a key that occurs twice and
    for a file with none.
    """
    conversations: list[Conversation] = []
    places: dict[str, str] = {}
    for file in files:
        before = len(conversations)
        for conversation in _read_file(file):
            if conversation.key in places:
                raise OverlayError(
                    f"{conversation.place}: the id {conversation.key!r} is that of {places[conversation.key]} already; "
                    "give every conversation an id of its own"
                )
            places[conversation.key] = conversation.place
            conversations.append(conversation)
        if len(conversations) == before:
            raise OverlayError(f"{file}: no conversation in it")
    return conversations


def _read_file(file: Path) -> Iterator[Conversation]:
    try:
        with file.open(encoding="utf-8-sig") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield _conversation(line, f"{file}:{number}", f"{file.stem}:{number}")
    except OSError as error:
        raise OverlayError(f"{file}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise OverlayError(f"{file}: is not UTF-8 ({error.reason} at byte {error.start} of a block)") from error


def _conversation(line: str, place: str, default_key: str) -> Conversation:
    try:
        fields = json.loads(line)
    except json.JSONDecodeError as error:
        raise OverlayError(f"{place}: is not JSON ({error.msg}); a chat file has one JSON object a line") from error
    if not isinstance(fields, dict):
        raise OverlayError(f"{place}: is a JSON {type(fields).__name__}; a chat file has one JSON object a line")
    if "messages" in fields:
        messages = [_message(turn, "role", "content", place) for turn in _turns(fields, "messages", place)]
    elif "conversations" in fields:
        messages = [_message(turn, "from", "value", place) for turn in _turns(fields, "conversations", place)]
    else:
        raise OverlayError(
            f'{place}: has neither "messages" nor "conversations" (it has: {", ".join(fields) or "nothing"})'
        )
    return Conversation(_key(fields.get("id"), default_key, place), place, tuple(messages))


def _key(given: Any, default: str, place: str) -> str:
    if given is None:
        return default
    if isinstance(given, bool) or not isinstance(given, (str, int)) or given == "":
        raise OverlayError(f'{place}: its "id" is {given!r}; an id is a text or a whole number')
    return str(given)


def _turns(fields: dict[str, Any], name: str, place: str) -> list[Any]:
    turns = fields[name]
    if not isinstance(turns, list) or not turns:
        raise OverlayError(f'{place}: "{name}" is not a list of turns, or is empty')
    return turns


def _message(turn: Any, role_name: str, text_name: str, place: str) -> dict[str, Any]:
    if not isinstance(turn, dict) or role_name not in turn:
        raise OverlayError(f'{place}: a turn has no "{role_name}"')
    role = turn[role_name]
    known = {name: name for name in ROLES} if role_name == "role" else SHAREGPT_ROLES
    if not isinstance(role, str) or role not in known:
        raise OverlayError(f'{place}: a turn has "{role_name}": {role!r}, which is none of {", ".join(known)}')
    # A mask over a call of a tool would need to know how the template writes it; better none than a wrong one.
    if turn.get("tool_calls"):
        raise OverlayError(f'{place}: a turn has "tool_calls", which are not read yet; take such conversations out')
    if not isinstance(turn.get(text_name), str):
        raise OverlayError(f'{place}: a turn of {role!r} has no text in "{text_name}"')
    others = {name: value for name, value in turn.items() if name not in (role_name, text_name)}
    return {"role": known[role], "content": turn[text_name], **others}
