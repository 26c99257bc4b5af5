"""What config.json says of a model's size, read as text: no torch, no vLLM, no weights."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_overlay.errors import OverlayError

_ITEMSIZES = {"float32": 4, "float": 4, "half": 2, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True)
class ModelShape:
    """The text model's sizes; `itemsize` is bytes an element in the dtype that vLLM will run."""

    num_hidden_layers: int
    hidden_size: int
    itemsize: int


def read_model_shape(model: str, engine_options: Sequence[str]) -> ModelShape:
    """The shape of a local model. `--dtype` among the engine's options wins over config.json.

    Errors: OverlayError when the folder has no config.json or it says nothing of the sizes.
    """
    file = Path(model) / "config.json"
    if not file.is_file():
        raise OverlayError(f"{model} is not a folder with a config.json: name a local model folder")
    config: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    text: dict[str, Any] = config.get("text_config") or config
    try:
        layers, hidden = int(text["num_hidden_layers"]), int(text["hidden_size"])
    except KeyError as error:
        raise OverlayError(f"{file} has no {error}: cannot tell how many bytes a token takes") from None
    return ModelShape(layers, hidden, _ITEMSIZES.get(_find_dtype(engine_options), 2))


def _find_dtype(engine_options: Sequence[str]) -> str:
    """The dtype asked for, or `auto`: vLLM runs a float32 checkpoint in 16 bits then, so `auto` is never 4 bytes."""
    for index, word in enumerate(engine_options):
        if word.startswith("--dtype="):
            return word.removeprefix("--dtype=")
        if word == "--dtype" and index + 1 < len(engine_options):
            return engine_options[index + 1]
    return "auto"
