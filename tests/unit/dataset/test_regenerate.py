"""The dialogue that `regenerate` holds with a target, without an engine: a function answers in its place."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.tiny_models import END_OF_TURN, tiny_tokenizer
from vllm_overlay.dataset.conversations import Conversation
from vllm_overlay.errors import OverlayError
from vllm_overlay.offline.regenerate import Answer, Generate, regenerate

DROPS_THINKING = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'].split('>')[-1] }}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def chat(key: str, *turns: tuple[str, str]) -> Conversation:
    return Conversation(key, f"f.jsonl:{key}", tuple({"role": role, "content": text} for role, text in turns))


class Target:
    """Answers with the texts given, in order, and keeps what it was asked."""

    def __init__(self, *answers: str) -> None:
        self.tokenizer = tiny_tokenizer()
        self.answers = list(answers)
        self.asked: list[list[str]] = []
        self.limits: list[list[int]] = []

    def __call__(self, prompts: Sequence[Sequence[int]], limits: Sequence[int]) -> list[Answer]:
        self.asked.append([self.tokenizer.decode(list(prompt)) for prompt in prompts])
        self.limits.append(list(limits))
        return [self._answer(limit) for limit in limits]

    def _answer(self, limit: int) -> Answer:
        ids = [*self.tokenizer(self.answers.pop(0))["input_ids"], END_OF_TURN]
        return Answer(tuple(ids[:limit]), stopped=len(ids) <= limit)


def test_turn_by_turn_with_the_targets_own_answers() -> None:
    target: Generate = (asked := Target("one", "uno", "two"))
    chats = [
        chat("1", ("system", "S"), ("user", "a"), ("assistant", "given"), ("user", "b"), ("assistant", "given")),
        chat("2", ("user", "c"), ("assistant", "given")),
    ]
    written = regenerate(chats, tiny_tokenizer(), target, max_tokens=10, max_length=200)
    first = "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
    second = first + "one<|im_end|>\n<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n"
    other = "<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n"
    assert asked.asked == [[first, other], [second]]
    assert (written.dropped, written.cut, written.rewritten) == (0, 0, 0)
    decode = asked.tokenizer.decode
    assert [decode(item.token_ids) for item in written.items] == [second + "two<|im_end|>", other + "uno<|im_end|>"]
    assert [decode(item.token_ids[item.loss_mask]) for item in written.items] == [
        "one<|im_end|>two<|im_end|>",
        "uno<|im_end|>",
    ]


def test_user_turns_alone_are_each_answered() -> None:
    asked = Target("one", "two")
    written = regenerate(
        [chat("1", ("user", "a"), ("user", "b"))], tiny_tokenizer(), asked, max_tokens=9, max_length=99
    )
    (item,) = written.items
    assert asked.tokenizer.decode(item.token_ids[item.loss_mask]) == "one<|im_end|>two<|im_end|>"


def test_an_answer_that_ran_out_of_tokens_is_closed_by_the_template() -> None:
    asked = Target("abcdef", "x")
    written = regenerate(
        [chat("1", ("user", "a"), ("user", "b"))], tiny_tokenizer(), asked, max_tokens=3, max_length=99
    )
    (item,) = written.items
    assert asked.asked[1][0].endswith(
        "assistant\nabc<|im_end|>\n<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n"
    )
    assert asked.tokenizer.decode(item.token_ids[item.loss_mask]) == "abcx<|im_end|>"


def test_generated_ids_are_kept_where_their_text_has_other_ids() -> None:
    """An unknown character decodes to `<unk>`; nothing is tokenised again."""

    def answer(prompts: Sequence[Sequence[int]], limits: Sequence[int]) -> list[Answer]:
        return [Answer((0, 2, 0, END_OF_TURN), stopped=True) for _ in prompts]

    (item,) = regenerate(
        [chat("1", ("user", "a"), ("user", "b"))], tiny_tokenizer(), answer, max_tokens=9, max_length=99
    ).items
    assert item.token_ids[item.loss_mask].tolist() == [0, 2, 0, END_OF_TURN] * 2


def test_history_rewritten_is_rendered_anew_and_said() -> None:
    asked = Target("hm>one", "hm>two")
    chats = [chat("1", ("user", "a"), ("user", "b"))]
    written = regenerate(chats, tiny_tokenizer(DROPS_THINKING), asked, max_tokens=10, max_length=200)
    (item,) = written.items
    assert written.rewritten == 1
    assert "assistant\none<|im_end|>\n<|im_start|>user\nb" in asked.asked[1][0]
    assert asked.tokenizer.decode(item.token_ids) == asked.asked[1][0] + "hm>two<|im_end|>"
    assert asked.tokenizer.decode(item.token_ids[item.loss_mask]) == "hm>two<|im_end|>"


def test_max_length_shortens_cuts_and_drops() -> None:
    prompt = len(tiny_tokenizer()("<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n")["input_ids"])
    asked = Target("abcdef", "abcdef")
    chats = [chat("1", ("user", "a"), ("user", "b")), chat("2", ("user", "a" * 99)), chat("3", ("user", "a"))]
    written = regenerate(chats, tiny_tokenizer(), asked, max_tokens=9, max_length=prompt + 4)
    assert asked.limits == [[4, 4]]
    assert [item.key for item in written.items] == ["1", "3"]
    assert [len(item.token_ids) for item in written.items] == [prompt + 4] * 2
    assert (written.dropped, written.cut) == (1, 1)
    with pytest.raises(OverlayError, match="no conversation leaves room for an answer within 5 tokens"):
        regenerate(chats, tiny_tokenizer(), asked, max_tokens=9, max_length=5)


def test_what_cannot_be_regenerated() -> None:
    for turns, says in (
        ([("user", "a"), ("tool", "t")], "f.jsonl:1: has a tool's turn"),
        ([("system", "a"), ("assistant", "t")], "f.jsonl:1: conversation '1' has no user turn"),
    ):
        with pytest.raises(OverlayError, match=says):
            regenerate([chat("1", *turns)], tiny_tokenizer(), Target(), max_tokens=9, max_length=99)
