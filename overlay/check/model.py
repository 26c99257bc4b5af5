"""The model's config.json: is it one, and what does it say of the text model?"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_overlay.check.line import Line
from vllm_overlay.model_shape import (
    ATTENTION_HEADS,
    HIDDEN,
    KV_HEADS,
    LAYERS,
    VOCABULARY,
    ConfigError,
    find_config,
    find_text_config,
    read_config,
    read_size,
)

_SIZED = (LAYERS, HIDDEN, VOCABULARY, ATTENTION_HEADS, KV_HEADS)


@dataclass(frozen=True)
class ModelFacts:
    """What config.json says. `text_key` is where the text model's configuration stands, empty if it is the whole.

    A size that is not in the file is None: the configuration's class has a default, which is not read.
    """

    file: Path
    config: Mapping[str, Any]
    architectures: tuple[str, ...]
    text_key: str
    text: Mapping[str, Any]
    num_hidden_layers: int
    hidden_size: int
    vocab_size: int | None
    num_attention_heads: int | None
    num_kv_heads: int | None

    @property
    def text_architecture(self) -> str | None:
        """What a nested text configuration calls its own architecture, if it does."""
        named = self.text.get("architectures") if self.text_key else None
        return named[0] if isinstance(named, list) and named and isinstance(named[0], str) else None

    @property
    def model_type(self) -> str:
        """The text model's type, such as `llama`."""
        return str(self.text.get("model_type") or self.config.get("model_type") or "")

    @property
    def has_experts(self) -> bool:
        """Whether it is a mixture of experts."""
        names = ("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts", "num_experts_per_tok")
        return any(self.text.get(name) for name in names)


def read_model(model: Path) -> ModelFacts:
    """Errors: ConfigError, one line for the first thing that is wrong."""
    file = find_config(model)
    config = read_config(file)
    key, text = find_text_config(config)
    layers, hidden, vocabulary, heads, kv_heads = (read_size(text, names) for names in _SIZED)
    for size, names in ((layers, LAYERS), (hidden, HIDDEN)):
        if size is None:
            raise ConfigError(f"{file} has no {names[0]!r}{f' in {key!r}' if key else ''}: is it a language model's?")
    assert layers is not None and hidden is not None
    return ModelFacts(
        file, config, _read_architectures(file, config), key, text, layers, hidden, vocabulary, heads, kv_heads
    )


def check_model(facts: ModelFacts) -> Iterator[Line]:
    """What the file says, in one line."""
    sizes = f"{facts.num_hidden_layers} layers, hidden size {facts.hidden_size}, " + (
        f"vocabulary {facts.vocab_size}" if facts.vocab_size else "vocabulary not in the file"
    )
    where = f"; the text model is in {facts.text_key!r}" if facts.text_key else ""
    yield Line(
        "model",
        "ok",
        "a config.json with architectures and sizes",
        f"{facts.file}: {', '.join(facts.architectures)}, {sizes}{where}",
    )


def _read_architectures(file: Path, config: Mapping[str, Any]) -> tuple[str, ...]:
    named = config.get("architectures")
    if named is None or named == []:
        raise ConfigError(f"{file} names no architectures: vLLM cannot tell which class serves it; add the list")
    if not isinstance(named, list) or not all(isinstance(one, str) and one for one in named):
        raise ConfigError(f"{file}: 'architectures' is {json.dumps(named)}, where a list of names is expected")
    return tuple(named)
