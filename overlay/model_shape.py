"""What config.json says of a model's size, read as text: no torch, no vLLM, no weights."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_overlay.errors import OverlayError

_ITEMSIZES = {"float32": 4, "float": 4, "half": 2, "float16": 2, "bfloat16": 2}

# The same size goes by other names in older configurations.
LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
HIDDEN = ("hidden_size", "n_embd", "d_model")
VOCABULARY = ("vocab_size", "padded_vocab_size")
ATTENTION_HEADS = ("num_attention_heads", "n_head", "n_heads")
KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num")

# Where the text model's configuration stands in that of a model with more than text.
TEXT_CONFIGS = ("text_config", "llm_config", "language_config")


class ConfigError(OverlayError):
    """config.json is not there, is no configuration, or does not say what is needed."""


@dataclass(frozen=True)
class ModelShape:
    """The text model's sizes; `itemsize` is bytes an element in the dtype that vLLM will run."""

    num_hidden_layers: int
    hidden_size: int
    itemsize: int


def read_model_shape(model: str, engine_options: Sequence[str]) -> ModelShape:
    """The shape of a local model. `--dtype` among the engine's options wins over config.json.

    Errors: ConfigError when there is no config.json to read or it says nothing of the sizes.
    """
    file = find_config(Path(model))
    text = find_text_config(read_config(file))[1]
    layers, hidden = read_size(text, LAYERS), read_size(text, HIDDEN)
    for size, names in ((layers, LAYERS), (hidden, HIDDEN)):
        if size is None:
            raise ConfigError(f"{file} has no {names[0]!r}: cannot tell how many bytes a token takes")
    assert layers is not None and hidden is not None
    return ModelShape(layers, hidden, find_itemsize(_find_dtype(engine_options)))


def find_config(model: Path) -> Path:
    """The config.json of a model folder, or the file itself. Errors: ConfigError."""
    if model.is_file():
        return model
    if not model.is_dir():
        raise ConfigError(f"there is no {model}: name a local model folder, or its config.json")
    file = model / "config.json"
    if not file.is_file():
        raise ConfigError(f"{model} is a folder without a config.json: name a model folder")
    return file


def read_config(file: Path) -> dict[str, Any]:
    """A configuration as it stands in the file. Errors: ConfigError."""
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"{file} is no valid JSON, line {error.lineno} column {error.colno}: {error.msg}; was it cut short?"
        ) from None
    except UnicodeDecodeError:
        raise ConfigError(f"{file} is not text in UTF-8: is it a config.json?") from None
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}") from None
    if not isinstance(config, dict):
        raise ConfigError(f"{file} holds {_name_type(config)} where a configuration is an object")
    return config


def find_text_config(config: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """The text model's configuration and the key that it stands under; the key is empty if it is the whole.

    Errors: ConfigError when what stands there is no object.
    """
    for key in TEXT_CONFIGS:
        if key not in config:
            continue
        if not isinstance(config[key], dict):
            raise ConfigError(f"config.json: {key!r} holds {_name_type(config[key])} where an object is expected")
        return key, config[key]
    return "", config


def read_size(config: Mapping[str, Any], names: Sequence[str]) -> int | None:
    """A size by the first of its names that is there; None if none is. Errors: ConfigError for what is no size."""
    name = next((name for name in names if config.get(name) is not None), None)
    if name is None:
        return None
    value = config[name]
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"config.json: {name!r} is {json.dumps(value)}, where a whole number above 0 is expected")
    return value


def find_itemsize(dtype: str) -> int:
    """Bytes an element in a dtype as vLLM takes it; of `auto` those of 16 bits, as vLLM runs float32 checkpoints."""
    return _ITEMSIZES.get(dtype, 2)


def count_row_bytes(hidden_size: int, itemsize: int, stored: str) -> int:
    """Bytes of one token's row in one layer; `stored` is VLLM_OVERLAY_DTYPE, and `fp8` has a scale of 4 bytes."""
    return hidden_size + 4 if stored == "fp8" else hidden_size * itemsize


def _find_dtype(engine_options: Sequence[str]) -> str:
    """The dtype asked for, or `auto`: vLLM runs a float32 checkpoint in 16 bits then, so `auto` is never 4 bytes."""
    for index, word in enumerate(engine_options):
        if word.startswith("--dtype="):
            return word.removeprefix("--dtype=")
        if word == "--dtype" and index + 1 < len(engine_options):
            return engine_options[index + 1]
    return "auto"


def _name_type(value: object) -> str:
    names = {list: "a list", str: "a text", bool: "true or false", int: "a number", float: "a number"}
    return names.get(type(value), "nothing")
