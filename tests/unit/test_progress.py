"""The bar: often on a terminal, seldom in a log, and never on the line of an error."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

import pytest

from vllm_overlay import progress
from vllm_overlay.cli import inspect, main
from vllm_overlay.errors import OverlayError


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


def fail_in_a_loop(error: BaseException) -> None:
    for _ in progress.make_bar(range(3), desc="made up"):
        raise error


def fail_beside_a_loop(error: BaseException) -> None:
    numbers = progress.make_bar(range(3), desc="made up")
    next(numbers)
    next(numbers)
    raise error


def fail_in_a_block(error: BaseException) -> None:
    with progress.make_bar(total=3, desc="made up"):
        raise error


def fail_in_a_block_that_is_wiped(error: BaseException) -> None:
    with progress.make_bar(total=3, desc="made up", leave=False):
        raise error


def fail_after_one_that_was_wiped(error: BaseException) -> None:
    with progress.make_bar(total=1, desc="made up", leave=False) as bar:
        bar.update()
    raise error


def test_a_bar_that_an_error_left_shows_how_far_it_came(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(OverlayError), progress.closing_bars():
        fail_beside_a_loop(OverlayError("no such thing"))
    assert "| 1/3 [" in capsys.readouterr().err


def test_items_come_through_a_bar_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(progress.make_bar(iter("abc"), total=3, desc="made up")) == ["a", "b", "c"]
    assert "| 3/3 [" in capsys.readouterr().err


def show_lines(written: str) -> list[str]:
    """What a terminal's lines show: text after a carriage return is written over what is there."""
    lines = []
    for line in written.split("\n"):
        shown = ""
        for part in line.split("\r"):
            shown = part + shown[len(part) :]
        lines.append(shown.rstrip())
    return lines


@pytest.mark.parametrize("is_terminal", [True, False])
@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OverlayError("no such thing"), "vllm-overlay: error: no such thing"),
        (KeyboardInterrupt(), "vllm-overlay: interrupted"),
    ],
)
@pytest.mark.parametrize(
    "fail",
    [
        fail_in_a_loop,
        fail_beside_a_loop,
        fail_in_a_block,
        fail_in_a_block_that_is_wiped,
        fail_after_one_that_was_wiped,
    ],
)
def test_an_error_is_said_on_a_line_of_its_own(
    fail: Callable[[BaseException], None], error: BaseException, said: str, is_terminal: bool,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    def run(args: argparse.Namespace) -> int:
        fail(error)
        return 0

    monkeypatch.setattr(inspect, "run", run)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    assert main(["inspect", "store"]) == (130 if isinstance(error, KeyboardInterrupt) else 1)
    written = capsys.readouterr().err
    assert "made up" in written
    lines = show_lines(written) if is_terminal else written.split("\n")
    assert lines[-2:] == [said, ""]
