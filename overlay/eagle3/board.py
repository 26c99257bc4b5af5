"""The lines of metrics.jsonl for TensorBoard too, in RUN/tensorboard."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Any

from vllm_overlay.errors import OverlayError


class Board:
    """Opened at its first line: the folder of a new run is not there before."""

    def __init__(self, run: Path) -> None:
        """Raises OverlayError: the package is missing."""
        if importlib.util.find_spec("tensorboard") is None:
            raise OverlayError("--tensorboard: the package is not installed: pip install tensorboard")
        self._folder = run / "tensorboard"
        self._writer: Any = None

    def show(self, line: dict[str, Any]) -> None:
        """Each number of a line as KIND/NAME, those of a list as KIND/NAME/1, KIND/NAME/2, ..."""
        if self._writer is None:
            writers = importlib.import_module("torch.utils.tensorboard")
            # A run that is resumed takes these steps anew.
            self._writer = writers.SummaryWriter(str(self._folder), purge_step=line["step"])
        for name in line.keys() - {"kind", "step"}:
            numbered = line[name] if isinstance(line[name], list) else None
            scalars = {name: line[name]} if numbered is None else {f"{name}/{i}": x for i, x in enumerate(numbered, 1)}
            for tag, value in scalars.items():
                if value is not None:
                    self._writer.add_scalar(f"{line['kind']}/{tag}", value, line["step"])
        self._writer.flush()
