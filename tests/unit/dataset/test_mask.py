from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tiny_models import CHATML, tiny_tokenizer
from vllm_overlay.dataset.conversations import Conversation
from vllm_overlay.dataset.mask import EncodedConversation, encode_conversation, tokenizer_sha256
from vllm_overlay.errors import OverlayError

WITH_MARKERS = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{% else %}"
    "{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

DROPS_THINKING = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' and not loop.last %}{{ message['content'].split('</think>')[-1] }}"
    "{% else %}{{ message['content'] }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

EMPTY_THINKING_IN_LAST_TURN = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' and loop.last %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    "{{ message['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

WITHOUT_END = (
    "{% for message in messages %}{{ ('Q: ' if message['role'] == 'user' else 'A: ') + message['content'] + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'A: ' }}{% endif %}"
)

# Gives the whole conversation a second special token that the model does not emit, as Phi-3 does.
CLOSED_BY_SECOND_TOKEN = (
    "{% for message in messages %}{{ '<|im_start|>' + message['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>' }}{% else %}{{ '<|endoftext|>' }}{% endif %}"
)


def chat(*turns: str, system: str | None = None) -> Conversation:
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(turns)]
    return Conversation("key", "f.jsonl:1", (*([{"role": "system", "content": system}] if system else []), *messages))


def answered(tokenizer: Any, encoded: EncodedConversation) -> str:
    return str(tokenizer.decode(encoded.token_ids[encoded.loss_mask]))


def test_eight_tokens_answer_at_4_to_6() -> None:
    """CASES 26, the mask: the answer and its end-of-turn token, not the template's newline after it."""
    template = (
        "{% for message in messages %}{{ '<|im_start|>' + message['content'] + '<|im_end|>' }}"
        "{% if message['role'] == 'assistant' %}{{ '\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>' }}{% endif %}"
    )
    encoded = encode_conversation(tiny_tokenizer(template), chat("Q", "AB"))
    assert encoded.token_ids.dtype == np.int64
    assert encoded.loss_mask.dtype == np.bool_
    assert encoded.loss_mask.tolist() == [False, False, False, False, True, True, True, False]


@pytest.mark.parametrize("template", [CHATML, WITH_MARKERS, CLOSED_BY_SECOND_TOKEN])
def test_every_answer_with_its_end_and_nothing_else(template: str) -> None:
    """CASES 27: a mask on the answers only, the same with generation markers and without."""
    tokenizer = tiny_tokenizer(template)
    conversation = chat("Hi", "yes <b>", "And?", "yes <b>", system="Be brief")
    encoded = encode_conversation(tokenizer, conversation)
    assert answered(tokenizer, encoded) == "yes <b><|im_end|>" * 2
    templated = tokenizer.apply_chat_template(list(conversation.messages), tokenize=True, return_dict=True)
    assert encoded.token_ids.tolist() == templated["input_ids"]
    if template != CLOSED_BY_SECOND_TOKEN:
        starts = np.flatnonzero(np.diff(encoded.loss_mask.astype(int)) == 1)
        assert [tokenizer.decode(encoded.token_ids[s - 9 : s + 1]) for s in starts] == ["assistant\n"] * 2


@settings(max_examples=60, deadline=None)
@given(st.lists(st.text(alphabet="ab <|im_end>\n.", max_size=12), min_size=1, max_size=4))
def test_any_answers(answers: list[str]) -> None:
    tokenizer = tiny_tokenizer()
    encoded = encode_conversation(tokenizer, chat(*(text for answer in answers for text in ("ab", answer))))
    assert answered(tokenizer, encoded) == "".join(f"{answer}<|im_end|>" for answer in answers)


def test_what_the_template_opens_the_answer_with_is_the_models() -> None:
    tokenizer = tiny_tokenizer(EMPTY_THINKING_IN_LAST_TURN)
    encoded = encode_conversation(tokenizer, chat("Hi", "think"))
    assert answered(tokenizer, encoded) == "<think>\n\n</think>\n\nthink<|im_end|>"


def test_a_template_without_end_of_turn() -> None:
    tokenizer = tiny_tokenizer(WITHOUT_END)
    encoded = encode_conversation(tokenizer, chat("one", "two", "three", "four"))
    assert answered(tokenizer, encoded) == "twofour"


@pytest.mark.parametrize("trim_offsets", [False, True])
def test_tokens_with_a_leading_space(trim_offsets: bool) -> None:
    """The generation prompt's last space is not the answer's, whichever offsets the tokenizer reports."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("Ġ", "t"), ("Ġt", "w"), ("Ġ", "Ġ")]
    vocabulary = {token: i for i, token in enumerate([*letters, *("".join(pair) for pair in merges), "<|im_end|>"])}
    backend = Tokenizer(models.BPE(vocabulary, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.post_processor = processors.ByteLevel(trim_offsets=trim_offsets)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>")
    tokenizer.chat_template = (
        "{% for message in messages %}{{ ('Q:  ' if message['role'] == 'user' else 'A: ') + message['content'] }}"
        "{{ '<|im_end|>' if message['role'] == 'assistant' else ' ' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'A: ' }}{% endif %}"
    )
    encoded = encode_conversation(tokenizer, chat("one", "(two  é 😀  ", "x", " (two"))
    assert answered(tokenizer, encoded) == "(two  é 😀  <|im_end|> (two<|im_end|>"


def test_history_rewritten_is_an_error() -> None:
    """CASES 27: where the answers cannot be told from the rest."""
    tokenizer = tiny_tokenizer(DROPS_THINKING)
    single = encode_conversation(tokenizer, chat("Hi", "<think>hm</think>yes"))
    assert answered(tokenizer, single) == "<think>hm</think>yes<|im_end|>"
    with pytest.raises(OverlayError, match=r"f\.jsonl:1: turn 2 of conversation 'key' cannot be placed"):
        encode_conversation(tokenizer, chat("Hi", "<think>hm</think>yes", "<think>hm</think>yes?", "no"))
    with pytest.raises(OverlayError, match="turn 2 of conversation 'key' cannot be placed"):
        encode_conversation(tiny_tokenizer(EMPTY_THINKING_IN_LAST_TURN), chat("Hi", "yes", "And?", "no"))


def test_markers_hold_where_history_is_rewritten() -> None:
    """Where the template marks the answers itself, a history without the thinking is no obstacle."""
    marked = "message['content'] + '<|im_end|>' }}{% endgeneration"
    template = WITH_MARKERS.replace(marked, marked.replace("['content']", "['content'][-3:]"))
    tokenizer = tiny_tokenizer(template)
    encoded = encode_conversation(tokenizer, chat("Hi", "<think>hm</think>yes", "And?", "sure"))
    assert answered(tokenizer, encoded) == "yes<|im_end|>ure<|im_end|>"


@pytest.mark.parametrize("template", [CHATML, WITH_MARKERS])
def test_nothing_of_the_assistant_is_an_error(template: str) -> None:
    """CASES 27: never all zero."""
    with pytest.raises(OverlayError, match=r"f\.jsonl:1: no token of conversation 'key' is the assistant's"):
        encode_conversation(tiny_tokenizer(template), chat("Hi"))


def test_a_template_that_refuses() -> None:
    template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(OverlayError, match=r"f\.jsonl:1: the chat template refuses .*: roles must alternate"):
        encode_conversation(tiny_tokenizer(template), chat("Hi", "yes"))


def test_tokenizer_sha256_sees_template_and_vocabulary() -> None:
    assert tokenizer_sha256(tiny_tokenizer()) == tokenizer_sha256(tiny_tokenizer())
    assert tokenizer_sha256(tiny_tokenizer()) != tokenizer_sha256(tiny_tokenizer(WITH_MARKERS))
    longer = tiny_tokenizer()
    longer.add_tokens(["new"])
    assert tokenizer_sha256(tiny_tokenizer()) != tokenizer_sha256(longer)
