"""Token ids of a conversation, and which of them the assistant wrote.

The ids are exactly what the tokenizer's `apply_chat_template(tokenize=True)` gives. The mask comes from the template's
own `{% generation %}` markers when it has them (transformers' `return_assistant_tokens_mask`); otherwise from the place
of each answer in the rendered text and the tokenizer's character offsets.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_overlay.dataset.conversations import Conversation
from vllm_overlay.errors import OverlayError

GENERATION_MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True)
class EncodedConversation:
    """`token_ids` [T] int64 and `loss_mask` [T] bool, true where the assistant wrote the token."""

    token_ids: npt.NDArray[np.int64]
    loss_mask: npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Span:
    """Characters `start` to `stop` (exclusive) of the rendered text."""

    start: int
    stop: int


def load_tokenizer(model: str) -> Any:
    """The tokenizer of `model` (a folder or a hub name), which must have a chat template.

    Raises OverlayError when it cannot be loaded or has no chat template.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError, ImportError) as error:
        raise OverlayError(f"{model}: its tokenizer does not load: {_first_line(error)}") from error
    require_chat_template(tokenizer, model)
    return tokenizer


def require_chat_template(tokenizer: Any, model: str) -> None:
    """Raises OverlayError when `tokenizer` has no chat template."""
    if not tokenizer.chat_template:
        raise OverlayError(f"{model}: its tokenizer has no chat template, so chats cannot be turned into tokens")


def tokenizer_sha256(tokenizer: Any) -> str:
    """Identifies vocabulary and chat template; the same for one checkpoint under every release of transformers."""
    vocabulary = sorted(tokenizer.get_vocab().items())
    return hashlib.sha256(json.dumps([vocabulary, tokenizer.chat_template], sort_keys=True).encode()).hexdigest()


def encode_conversation(tokenizer: Any, conversation: Conversation) -> EncodedConversation:
    """Render, tokenise and mask one conversation.

    The mask covers the assistant's text and the end-of-turn token that the model emits after it; not the generation
    prompt before it, not what the template adds after it. Raises OverlayError, naming the conversation, when the
    template refuses it, when the template rewrites earlier turns so that the answers cannot be placed, and when nothing
    is masked in.
    """
    if GENERATION_MARKER.search(tokenizer.get_chat_template()):
        encoded = _mask_by_markers(tokenizer, conversation)
    else:
        encoded = _mask_by_offsets(tokenizer, conversation)
    if not encoded.loss_mask.any():
        raise OverlayError(
            f"{conversation.place}: no token of conversation {conversation.key!r} is the assistant's, so there is "
            "nothing to learn from it; take it out, or let the target write the answers (--regenerate)"
        )
    return encoded


def render(tokenizer: Any, messages: Sequence[dict[str, Any]], place: str, *, generation_prompt: bool = False) -> str:
    """The chat template's text for `messages`. Raises OverlayError with the template's own words when it refuses
    them."""
    from jinja2 import TemplateError

    try:
        text = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=generation_prompt)
    except TemplateError as error:
        raise OverlayError(f"{place}: the chat template refuses the conversation: {_first_line(error)}") from error
    return str(text)


def tokenise(tokenizer: Any, text: str) -> list[int]:
    """Ids of rendered text; the template has written every special token itself."""
    return [int(token) for token in tokenizer(text, add_special_tokens=False)["input_ids"]]


def _mask_by_markers(tokenizer: Any, conversation: Conversation) -> EncodedConversation:
    render(tokenizer, conversation.messages, conversation.place)
    encoded = tokenizer.apply_chat_template(
        list(conversation.messages), tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    return EncodedConversation(
        np.asarray(encoded["input_ids"], dtype=np.int64), np.asarray(encoded["assistant_masks"], dtype=np.bool_)
    )


def _mask_by_offsets(tokenizer: Any, conversation: Conversation) -> EncodedConversation:
    if not tokenizer.is_fast:
        raise OverlayError(
            f"{conversation.place}: this tokenizer gives no character offsets and its chat template has no "
            "generation markers, so the answers cannot be placed; let the target write them (--regenerate)"
        )
    text = render(tokenizer, conversation.messages, conversation.place)
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    token_ids = np.asarray(encoded["input_ids"], dtype=np.int64)  # [T]
    starts, stops = np.asarray(encoded["offset_mapping"], dtype=np.int64).reshape(-1, 2).T  # [T], [T]
    templated = tokenizer.apply_chat_template(list(conversation.messages), tokenize=True, return_dict=True)["input_ids"]
    if token_ids.tolist() != list(templated):
        raise OverlayError(
            f"{conversation.place}: the tokenizer gives other ids for the rendered text than for the chat"
        )

    special = np.isin(token_ids, _special_ids(tokenizer))
    loss_mask = np.zeros(len(token_ids), dtype=np.bool_)
    for turn, message in enumerate(conversation.messages):
        if message["role"] != "assistant":
            continue
        answer, shown = _place_answer(tokenizer, conversation, turn, text)
        # The turn ends with the first special token after the answer; a template without one ends it with the answer.
        endings = np.flatnonzero(special & (starts >= answer.stop) & (stops <= shown.stop))
        stop = int(stops[endings[0]]) if endings.size else answer.stop
        # A tokenizer may report offsets without the leading space, down to an empty range: compare the end with the
        # start.
        loss_mask |= (stops > shown.start) & (starts < stop)
    return EncodedConversation(token_ids, loss_mask)


def _place_answer(tokenizer: Any, conversation: Conversation, turn: int, text: str) -> tuple[Span, Span]:
    """The answer's own text, and all that the template shows for that turn after the generation prompt."""
    place, messages = conversation.place, conversation.messages
    before = render(tokenizer, messages[:turn], place, generation_prompt=True) if turn else ""
    after = render(tokenizer, messages[: turn + 1], place)
    shown = Span(len(before), _shared_length(text, after))
    answer = messages[turn]["content"].strip()
    start = text.find(answer, shown.start, shown.stop)
    if not turn or not text.startswith(before) or not after.startswith(before) or start < 0:
        raise OverlayError(
            f"{place}: turn {turn + 1} of conversation {conversation.key!r} cannot be placed: the chat template "
            "does not show it in the whole conversation as it shows it alone, and has no generation markers; let the "
            "target write the answers (--regenerate)"
        )
    return Span(start, start + len(answer)), shown


def _shared_length(one: str, other: str) -> int:
    differing = (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return next(differing, min(len(one), len(other)))


def _special_ids(tokenizer: Any) -> list[int]:
    marked = [token for token, added in tokenizer.added_tokens_decoder.items() if added.special]
    return [*marked, *tokenizer.all_special_ids]


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
