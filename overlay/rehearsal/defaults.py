"""What a config.json leaves to its class: kinds of layers and sizes that are not in the file (Gemma 3's pattern)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm_overlay.errors import OverlayError
from vllm_overlay.model_shape import ATTENTION_HEADS, KV_HEADS, LAYERS, VOCABULARY, find_text_config, read_size
from vllm_overlay.rehearsal.depth import list_fields
from vllm_overlay.rehearsal.model_folder import write_model_folder
from vllm_overlay.settings import PREFIX, SWITCH

# vLLM's imports take most of it.
MOST_SECONDS = 120.0


class DefaultsError(OverlayError):
    """What the class says cannot be had."""


def read_defaults(config: Mapping[str, Any], code: Path | None, seconds: float) -> Mapping[str, Any]:
    """All fields of the text model as the configuration's class has them, read in a process that ends in time.

    `code` is a folder whose Python files belong to the model; None if none may be run. Errors: DefaultsError where no
    class reads it; OSError where the temporary folder takes no files.
    """
    with tempfile.TemporaryDirectory(prefix="vllm-overlay-rehearsal-") as name:
        model, file = Path(name, "model"), Path(name, "fields.json")
        write_model_folder(model, config, code)
        words = [str(model), str(file), "trusted" if code else "not-trusted"]
        try:
            done = subprocess.run(
                [sys.executable, "-m", "vllm_overlay.rehearsal.class_config", *words],
                env=_make_environment(os.environ, Path(name)),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                encoding="utf-8",
                errors="replace",
                timeout=min(seconds, MOST_SECONDS),
            )
        except subprocess.TimeoutExpired as error:
            raise DefaultsError(f"no answer in {error.timeout:.0f} s") from None
        if not file.is_file():
            raise DefaultsError((done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1])
        fields: Mapping[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return fields


def complete(config: Mapping[str, Any], defaults: Mapping[str, Any]) -> Mapping[str, Any]:
    """The configuration, and of the class's fields those missing in it that say sizes, or something of each layer.

    Errors: ConfigError for what is no size; DefaultsError when the class means another number of layers.
    """
    key, text = find_text_config(config)
    count = read_size(text, LAYERS)
    if count is None or read_size(defaults, LAYERS) != count:
        raise DefaultsError(f"its class has {read_size(defaults, LAYERS)} layers where the file has {count}")
    names = [field.path[0] for field in list_fields(defaults, count) if len(field.path) == 1]
    for sizes in (ATTENTION_HEADS, KV_HEADS, VOCABULARY):
        if read_size(text, sizes) is None:
            names += [name for name in sizes if defaults.get(name)][:1]
    whole = dict(text) | {name: defaults[name] for name in names if text.get(name) is None}
    return {**config, key: whole} if key else whole


def _make_environment(environ: Mapping[str, str], folder: Path) -> dict[str, str]:
    """Without us, and with the model's own code in the folder and not among the user's modules."""
    kept = {name: value for name, value in environ.items() if name != SWITCH and not name.startswith(PREFIX)}
    return kept | {"HF_HUB_OFFLINE": "1", "HF_MODULES_CACHE": str(folder / "modules")}
