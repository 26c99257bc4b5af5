"""The bar that long work shows on stderr."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

# Where a bar cannot be drawn over, each time that it is drawn stays in the log.
PAUSE_IN_A_LOG_S = 10.0
PAUSE_S = 0.1

_bars: weakref.WeakSet[Any] = weakref.WeakSet()


def make_bar(items: Iterable[Any] | None = None, **options: Any) -> Any:
    """The items, under a bar of tqdm's; without items the bar, to be updated. `options` are tqdm's.

    Where stderr is a file or a pipe it is not drawn over and over, and stays at the end: wiped away there, it would
    leave its line to what is printed next.
    """
    from tqdm import tqdm

    options["mininterval"] = PAUSE_S
    if not sys.stderr.isatty():
        options |= {"mininterval": PAUSE_IN_A_LOG_S, "leave": True}
    bar = tqdm(items, **options)
    _bars.add(bar)
    return bar if items is None else _step(bar, items)


def _step(bar: Any, items: Iterable[Any]) -> Iterator[Any]:
    """As tqdm's own loop, which keeps the count to itself: a bar closed from outside would show an older one."""
    with bar:
        for item in items:
            yield item
            bar.update()


@contextmanager
def closing_bars() -> Iterator[None]:
    """However the block ends, end the lines of all bars. An error keeps those open that a function which it left was
    still to read on from: its traceback holds them."""
    try:
        yield
    finally:
        for bar in list(_bars):
            bar.close()
