"""Prompts as the target is shown them: chats up to the last user's turn, rendered by the target's own template."""

from __future__ import annotations

from pathlib import Path

from vllm_overlay.dataset.conversations import read_conversations
from vllm_overlay.dataset.mask import load_tokenizer, render, require_chat_template, tokenise
from vllm_overlay.errors import OverlayError


def read_prompts(file: Path, model: str) -> list[list[int]]:
    """Token ids of each conversation's turns up to its last user turn, with the prompt for an answer after them.

    Errors: OverlayError for a bad file, a conversation without a user's turn, or a target without a chat template.
    """
    tokenizer = load_tokenizer(model)
    require_chat_template(tokenizer, model)
    prompts = []
    for conversation in read_conversations([file]):
        messages = list(conversation.messages)
        while messages and messages[-1]["role"] != "user":
            messages.pop()
        if not messages:
            raise OverlayError(f"{conversation.place}: no user's turn to answer")
        text = render(tokenizer, messages, conversation.place, generation_prompt=True)
        prompts.append(tokenise(tokenizer, text))
    return prompts
