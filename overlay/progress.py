"""The bar that long work shows on stderr."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

# Where a bar cannot be drawn over, each time that it is drawn stays in the log.
PAUSE_IN_A_LOG_S = 10.0
PAUSE_S = 0.1


def make_bar(items: Iterable[Any] | None = None, **options: Any) -> Any:
    """tqdm's bar over `items`, or one to be updated; `options` are tqdm's. Not drawn over and over where stderr is a
    file or a pipe."""
    from tqdm import tqdm

    pause = PAUSE_S if sys.stderr.isatty() else PAUSE_IN_A_LOG_S
    return tqdm(items, mininterval=pause, **options)
