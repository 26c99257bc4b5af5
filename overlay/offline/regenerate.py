"""The target writes the assistant's turns itself, so that a draft learns from what the target says and not from what a
dataset says.

Turn by turn, all conversations together: the first turn of every conversation is one batch, then the second with the
target's own first as history. The ids that the engine generated are kept as they are. The history of a later turn is
those same ids plus the tokens of what the template puts after them. Where the template rewrites history (a template
that drops earlier thinking, for one), that is not what the target is shown when it serves: there the conversation is
rendered anew, and only the answers after that point are masked in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from vllm_overlay.dataset import DatasetItem
from vllm_overlay.dataset.conversations import Conversation
from vllm_overlay.dataset.mask import render, tokenise
from vllm_overlay.errors import OverlayError

if TYPE_CHECKING:
    from vllm import LLM


@dataclass(frozen=True)
class Answer:
    """What the engine generated: the ids, with the end-of-turn token when `stopped` (it is missing when the length ran
    out)."""

    token_ids: tuple[int, ...]
    stopped: bool


@dataclass(frozen=True)
class Regenerated:
    """The conversations as the target wrote them, and what did not fit: all counts are conversations."""

    items: list[DatasetItem]
    dropped: int
    """the first prompt left no room for an answer"""
    cut: int
    """a later turn left no room: the conversation ends before it"""
    rewritten: int
    """the template rewrote history: only the answers from there on are masked in"""


Generate = Callable[[Sequence[Sequence[int]], Sequence[int]], list[Answer]]
"""Prompts as token ids, and for each the most tokens to generate."""


@dataclass
class _Chat:
    """A conversation while it is being written: what is shown to the target so far, as messages, text and ids."""

    conversation: Conversation
    segments: list[list[dict[str, Any]]]
    messages: list[dict[str, Any]] = field(default_factory=list)
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    loss_mask: list[bool] = field(default_factory=list)
    cut: bool = False
    rewritten: bool = False


def regenerate(
    conversations: Sequence[Conversation], tokenizer: Any, generate: Generate, *, max_tokens: int, max_length: int
) -> Regenerated:
    """An answer of at most `max_tokens` after every user turn; answers in `conversations` are left out.

    A conversation has at most `max_length` tokens, prompt and answers. Raises OverlayError for a conversation without a
    user turn or with a tool's turn (a tool answers a call that the target may not make), and when nothing is left.
    """
    chats = [_Chat(conversation, _segments(conversation)) for conversation in conversations]
    going = list(chats)
    while going:
        going = [chat for chat in going if _ask(chat, tokenizer, max_length)]
        limits = [min(max_tokens, max_length - len(chat.token_ids)) for chat in going]
        answers = generate([chat.token_ids for chat in going], limits) if going else []
        for chat, answer in zip(going, answers, strict=True):
            _answer(chat, answer, tokenizer)
        going = [chat for chat in going if chat.segments]
    items = [
        DatasetItem(chat.conversation.key, np.asarray(chat.token_ids, np.int64), np.asarray(chat.loss_mask, np.bool_))
        for chat in chats
        if chat.token_ids
    ]
    if not items:
        raise OverlayError(
            f"no conversation leaves room for an answer within {max_length} tokens; "
            "raise --max-length or vLLM's --max-model-len"
        )
    return Regenerated(
        items,
        dropped=len(chats) - len(items),
        cut=sum(chat.cut for chat in chats),
        rewritten=sum(chat.rewritten for chat in chats),
    )


def vllm_generate(llm: LLM, temperature: float) -> Generate:
    """Generation with the model's own sampling defaults (generation_config.json), as `vllm serve`, at `temperature`."""

    def generate(prompts: Sequence[Sequence[int]], limits: Sequence[int]) -> list[Answer]:
        sampling = []
        for limit in limits:
            parameters = llm.get_default_sampling_params()
            parameters.temperature = temperature
            parameters.max_tokens = limit
            parameters.detokenize = False
            sampling.append(parameters)
        outputs = llm.generate([{"prompt_token_ids": list(prompt)} for prompt in prompts], sampling)
        firsts = [request.outputs[0] for request in outputs]
        return [Answer(tuple(first.token_ids), first.finish_reason == "stop") for first in firsts]

    return generate


def _segments(conversation: Conversation) -> list[list[dict[str, Any]]]:
    """The given turns without the answers, cut after every user turn."""
    segments: list[list[dict[str, Any]]] = [[]]
    for message in conversation.messages:
        if message["role"] == "tool":
            raise OverlayError(f"{conversation.place}: has a tool's turn; --regenerate cannot write the call before it")
        if message["role"] == "assistant":
            continue
        segments[-1].append(message)
        if message["role"] == "user":
            segments.append([])
    segments.pop()  # what follows the last user turn is answered by nobody
    if not segments:
        raise OverlayError(f"{conversation.place}: conversation {conversation.key!r} has no user turn to answer")
    return segments


def _ask(chat: _Chat, tokenizer: Any, max_length: int) -> bool:
    """Put the next user turn and the generation prompt behind the chat; false, and no change, when that leaves no
    room."""
    messages = [*chat.messages, *chat.segments[0]]
    text = render(tokenizer, messages, chat.conversation.place, generation_prompt=True)
    kept = text.startswith(chat.text)
    new_ids = tokenise(tokenizer, text[len(chat.text) :] if kept else text)
    old_ids, old_mask = (chat.token_ids, chat.loss_mask) if kept else ([], [])
    if len(old_ids) + len(new_ids) >= max_length:
        chat.cut = bool(chat.token_ids)
        return False
    chat.segments = chat.segments[1:]
    chat.messages, chat.text = messages, text
    chat.token_ids = old_ids + new_ids
    chat.loss_mask = old_mask + [False] * len(new_ids)
    chat.rewritten |= not kept
    return True


def _answer(chat: _Chat, answer: Answer, tokenizer: Any) -> None:
    """Put what the target generated behind the chat."""
    content = _decode(tokenizer, answer.token_ids[:-1] if answer.stopped else answer.token_ids)
    chat.messages = [*chat.messages, {"role": "assistant", "content": content}]
    chat.text += _decode(tokenizer, answer.token_ids)
    chat.token_ids = [*chat.token_ids, *answer.token_ids]
    chat.loss_mask = [*chat.loss_mask, *(True for _ in answer.token_ids)]


def _decode(tokenizer: Any, token_ids: Sequence[int]) -> str:
    return str(tokenizer.decode(list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))
