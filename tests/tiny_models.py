"""Tiny checkpoints made on the spot: a tokenizer of single characters and a random Llama, both of vocabulary 128."""

from __future__ import annotations

from pathlib import Path
from typing import Any

VOCAB_SIZE = 128
SPECIAL_TOKENS = ("<unk>", "<|endoftext|>", "<|im_start|>", "<|im_end|>")
END_OF_TURN = SPECIAL_TOKENS.index("<|im_end|>")

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""No generation markers, nothing rewritten."""


def characters() -> list[str]:
    """The tokens after the special ones: newline, printable ASCII, and accented letters to fill the vocabulary."""
    printable = ["\n", *map(chr, range(32, 127))]
    return printable + [chr(0xC0 + i) for i in range(VOCAB_SIZE - len(SPECIAL_TOKENS) - len(printable))]


def tiny_tokenizer(chat_template: str | None = CHATML) -> Any:
    """One token a character, so that text and ids can be compared by eye; end of sequence is `<|im_end|>`."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers  # type: ignore[import-untyped]
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: i for i, token in enumerate([*SPECIAL_TOKENS, *characters()])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        unk_token="<unk>",
        bos_token="<|endoftext|>",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = chat_template
    return tokenizer


def write_tiny_llama(
    folder: Path, *, layers: int = 6, seed: int = 0, spread: float = 0.15, chat_template: str | None = CHATML
) -> Path:
    """A random Llama in float32, hidden 128, 2 heads of 64 and 1 key-value head, with its tokenizer; returns `folder`.

    `spread` is the weights' standard deviation: 0.15 makes states of size 50, 0.05 of size 1, where float32 rounding
    stays under 1e-4. Heads of 64 are what vLLM's CPU attention takes in every release. The weights are wide enough that
    the best next token is not a matter of rounding.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=192,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        max_position_embeddings=512,
        initializer_range=spread,
        tie_word_embeddings=False,
        bos_token_id=SPECIAL_TOKENS.index("<|endoftext|>"),
        eos_token_id=END_OF_TURN,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config).float()
    model.save_pretrained(folder)
    tiny_tokenizer(chat_template).save_pretrained(folder)
    return folder
