"""Tiny checkpoints made on the spot: a tokenizer of single characters, and random models of its vocabulary of 128."""

# tokenizers has annotations from 0.23 on: an `ignore` where it is imported would be one too many there.
# mypy: disable-error-code="import-untyped"

from __future__ import annotations

import json
from dataclasses import dataclass
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


# What the models here with two heads and one key-value head share.
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 512,
    "bos_token_id": SPECIAL_TOKENS.index("<|endoftext|>"),
    "eos_token_id": END_OF_TURN,
    "dtype": "float32",
}


def characters() -> list[str]:
    """The tokens after the special ones: newline, printable ASCII, and accented letters to fill the vocabulary."""
    printable = ["\n", *map(chr, range(32, 127))]
    return printable + [chr(0xC0 + i) for i in range(VOCAB_SIZE - len(SPECIAL_TOKENS) - len(printable))]


def tiny_tokenizer(chat_template: str | None = CHATML) -> Any:
    """One token a character, so that text and ids can be compared by eye; end of sequence is `<|im_end|>`."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
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
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        **SMALL,
        num_hidden_layers=layers,
        intermediate_size=192,
        head_dim=64,
        initializer_range=spread,
        tie_word_embeddings=False,
    )
    save_random(LlamaForCausalLM, config, folder, seed)
    tiny_tokenizer(chat_template).save_pretrained(folder)
    return folder


def save_random(model_class: Any, config: Any, folder: Path, seed: int) -> None:
    """A model with random float32 weights, the same for the same seed."""
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config).float()
    model.save_pretrained(folder)


def write_tiny_mixtral(folder: Path, *, layers: int = 4, seed: int = 0) -> Path:
    """A random Mixtral in float32, hidden 128, two of four experts a token, with its tokenizer."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        **SMALL,
        num_hidden_layers=layers,
        intermediate_size=128,
        head_dim=64,
        num_local_experts=4,
        num_experts_per_tok=2,
        initializer_range=0.05,
    )
    save_random(MixtralForCausalLM, config, folder, seed)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def write_tiny_gemma2(folder: Path, *, layers: int = 4, window: int = 32, seed: int = 0) -> Path:
    """A random Gemma 2 in float32, hidden 128: layers that see `window` tokens, and every second one that sees all.

    No caps on logits: transformers' default attention leaves them out.
    """
    from transformers import Gemma2Config, Gemma2ForCausalLM

    config = Gemma2Config(
        **SMALL,
        num_hidden_layers=layers,
        intermediate_size=192,
        head_dim=64,
        hidden_act="gelu_pytorch_tanh",  # beside transformers' hidden_activation: vLLM before 0.18 reads this
        query_pre_attn_scalar=64,
        sliding_window=window,
        attn_logit_softcapping=None,
        final_logit_softcapping=None,
        initializer_range=0.05,
        pad_token_id=0,
    )
    save_random(Gemma2ForCausalLM, config, folder, seed)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def write_tiny_gemma4(folder: Path, *, layers: int = 4, window: int = 32, seed: int = 0) -> Path:
    """As Gemma 2, with heads of 32 in the layers that see `window` tokens and of 64 in the others (transformers 5)."""
    from transformers import Gemma4ForCausalLM, Gemma4TextConfig

    config = Gemma4TextConfig(
        **SMALL,
        num_hidden_layers=layers,
        intermediate_size=192,
        head_dim=32,
        global_head_dim=64,
        layer_types=["sliding_attention", "full_attention"] * (layers // 2),
        sliding_window=window,
        vocab_size_per_layer_input=VOCAB_SIZE,
        hidden_size_per_layer_input=32,
        initializer_range=0.05,
        pad_token_id=0,
    )
    save_random(Gemma4ForCausalLM, config, folder, seed)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@dataclass(frozen=True)
class Latent:
    """The sizes of multi-head latent attention."""

    heads: int = 1
    rank: int = 32
    without_position: int = 32
    with_position: int = 32
    value: int = 64


# What the kernels of a GPU are made for.
FOR_GPU_KERNELS = Latent(heads=16, rank=512, without_position=128, with_position=64, value=128)


def write_tiny_deepseek(
    folder: Path,
    *,
    layers: int = 4,
    dense_layers: int = 1,
    seed: int = 0,
    spread: float = 0.15,
    latent: Latent = Latent(),
) -> Path:
    """A random DeepSeek-V3 in float32, hidden 128, dense layers and then mixtures of experts, with its tokenizer.

    A head of 32 + 32 is 64 wide where MLA is off, which is what vLLM's CPU attention takes. There is one, because the
    CPU's kernel for interleaved rotary embeddings (0.16.0) mistakes the heads of a three-dimensional query for tokens.
    Every token goes to all four experts: where it chooses, rounding to bfloat16 chooses others, and states are far
    apart for a good reason.
    """
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    config = DeepseekV3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=192,
        moe_intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=latent.heads,
        num_key_value_heads=latent.heads,
        n_shared_experts=1,
        n_routed_experts=4,
        num_experts_per_tok=4,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=dense_layers,
        routed_scaling_factor=1.0,
        q_lora_rank=None,
        kv_lora_rank=latent.rank,
        qk_nope_head_dim=latent.without_position,
        qk_rope_head_dim=latent.with_position,
        v_head_dim=latent.value,
        max_position_embeddings=512,
        initializer_range=spread,
        tie_word_embeddings=False,
        bos_token_id=SPECIAL_TOKENS.index("<|endoftext|>"),
        eos_token_id=END_OF_TURN,
        dtype="float32",
    )
    save_random(DeepseekV3ForCausalLM, config, folder, seed)
    # transformers has no such fields and does what they say; vLLM's defaults are DeepSeek-V2's.
    as_v3 = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | as_v3, indent=2))
    tiny_tokenizer().save_pretrained(folder)
    return folder
