"""The bar: often on a terminal, seldom in a log."""

from __future__ import annotations

import sys

import pytest

from vllm_overlay import progress


@pytest.mark.parametrize(("is_terminal", "least", "most"), [(True, 4, 9), (False, 1, 2)])
def test_a_bar_is_drawn_as_often_as_its_place_bears(
    is_terminal: bool, least: int, most: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "PAUSE_S", 0.0)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    with progress.make_bar(total=6, desc="made up", miniters=1) as bar:
        for _ in range(6):
            bar.update()
    assert least <= capsys.readouterr().err.count("made up") <= most
