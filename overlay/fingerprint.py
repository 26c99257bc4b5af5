"""A target's fingerprint: tells one set of weights from another without reading all of them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_SAMPLES = 16
_SAMPLE_BYTES = 4096
# Written into the configuration by whoever loads it; the weights are the same.
_NOT_THE_MODEL = ("transformers_version", "_name_or_path", "torch_dtype", "dtype", "use_cache")


def fingerprint_model(model: str, config: Mapping[str, Any]) -> str:
    """SHA-256 (hexadecimal) over the architecture and, for a local folder, samples of every weight file.

    Of each `*.safetensors` file it takes the name, the size and blocks of 4 KiB at 16 even places, the first of which
    is the header. A model that is not a local folder is known by its name and configuration only.

    Errors: OSError when a weight file cannot be read.
    """
    digest = hashlib.sha256()
    folder = Path(model)
    if not folder.is_dir():
        digest.update(json.dumps([model, _architecture(config)], sort_keys=True, default=str).encode())
        return digest.hexdigest()
    own = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    digest.update(json.dumps(_architecture(own), sort_keys=True).encode())
    for file in sorted(folder.glob("*.safetensors")):
        size = file.stat().st_size
        digest.update(f"{file.name} {size}".encode())
        with file.open("rb") as stream:
            for sample in range(_SAMPLES):
                stream.seek(max(0, size - _SAMPLE_BYTES) * sample // (_SAMPLES - 1))
                digest.update(stream.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def _architecture(config: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in _NOT_THE_MODEL}
