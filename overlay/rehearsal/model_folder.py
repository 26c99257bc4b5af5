"""A folder that vLLM takes for a model's: a config.json, and the Python files that belong to it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def write_model_folder(folder: Path, config: Mapping[str, Any], code: Path | None) -> None:
    """Make the folder. `code` is where the model's own Python files lie; None if none may be run. Errors: OSError."""
    folder.mkdir()
    Path(folder, "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    for file in code.glob("*.py") if code else ():
        if file.is_file():
            shutil.copy(file, folder)
