"""What is told of an exception, and how it gets from process to process."""

from __future__ import annotations

import logging
import multiprocessing
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from vllm_overlay import failures
from vllm_overlay.failures import Failure, add_failures, describe, note, read_failures
from vllm_overlay.shared_folder import FOLDER_VARIABLE


class Particular(Exception):
    """It can neither be made from a text nor pickled."""

    def __init__(self, code: int, *, where: str) -> None:
        super().__init__(code)
        self.where = where
        self.callback = lambda: code


class Unreadable(Exception):
    def __str__(self) -> str:
        raise TypeError("no text")


class Engines:
    """Stands for vLLM's manager of engine processes."""


def caught(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as raised:  # noqa: BLE001  whatever it is
        return raised


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    return tmp_path


def make_failure(time_ns: int, process_id: int, engine_id: int, **more: Any) -> Failure:
    facts = replace(
        describe(caught(ValueError("boom-17")), "worker", 1),
        time_ns=time_ns,
        process_id=process_id,
        engine_id=engine_id,
    )
    return replace(facts, **more)


def test_a_bare_assert_says_what_and_where() -> None:
    """CASES 22."""
    try:
        assert os.getpid() == 0
    except AssertionError as error:
        bare = AssertionError().with_traceback(error.__traceback__)
    failure = describe(bare, "worker", 3)
    line = test_a_bare_assert_says_what_and_where.__code__.co_firstlineno + 3
    assert failure.headline == (
        f'AssertionError: (no message) (rank 3, worker process {os.getpid()}, file "{__file__}", line {line}, '
        "in test_a_bare_assert_says_what_and_where: assert os.getpid() == 0)"
    )
    assert failure.traceback.startswith("Traceback (most recent call last):")


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ValueError("boom-17"), "ValueError: boom-17 ("),
        (KeyError(""), "KeyError: '' ("),
        (Particular(17, where="here"), "Particular: 17 ("),
        (Unreadable(), "Unreadable: (its message cannot be read: TypeError) ("),
        (RuntimeError("one\ntwo"), "RuntimeError: one ("),
    ],
    ids=lambda it: type(it).__name__,
)
def test_the_headline_is_one_line(error: Exception, expected: str) -> None:
    failure = describe(caught(error), "worker", 0)
    assert failure.headline.startswith(expected)
    assert "\n" not in failure.headline
    assert failure.text.startswith(failure.headline)


def test_the_text_holds_the_whole_message_and_what_was_handled_meanwhile() -> None:
    try:
        try:
            raise KeyError("first-17")
        except KeyError:
            raise ValueError("second-18\nand more")  # noqa: B904
    except ValueError as error:
        text = describe(error, "engine", None).text
    assert text.index("KeyError: 'first-17'") < text.rindex("ValueError: second-18\nand more")
    assert "rank" not in text.partition("\n")[0]


def test_vllms_note_of_the_traceback_is_left_out_and_a_users_stays() -> None:
    error = caught(ValueError("boom-17"))
    if not hasattr(error, "add_note"):
        pytest.skip("notes came with Python 3.11")
    error.add_note("Traceback (most recent call last):\n  the same again")
    error.add_note("try less")
    assert "the same again" not in describe(error, "worker", 0).text
    assert describe(error, "worker", 0).text.endswith("ValueError: boom-17\ntry less")


def test_failures_are_read_in_the_order_in_which_they_happened(folder: Path) -> None:
    later, first, other = make_failure(30, 11, 10), make_failure(20, 10, 10), make_failure(10, 21, 20)
    for failure in (later, first, other):
        note(failure)
    assert read_failures({10}) == [first, later]
    assert read_failures({11}) == [later]
    assert read_failures({10, 20}) == [other, first, later]
    assert read_failures({99}) == []


def test_without_a_folder_nothing_is_written_or_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FOLDER_VARIABLE, raising=False)
    note(make_failure(1, 2, 3))
    assert read_failures({2}) == []


def test_a_folder_that_cannot_be_written_to_does_not_hide_the_failure(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(Path, "write_text", refuse)
    with caplog.at_level(logging.ERROR):
        note(make_failure(1, 2, 3))
    assert "disk full" in caplog.text
    assert "ValueError: boom-17" in caplog.text


def _note_in_child(rank: int) -> None:
    note(describe(caught(ValueError("boom-17")), "worker", rank))


def test_a_spawned_process_tells_its_parent(folder: Path) -> None:
    child = multiprocessing.get_context("spawn").Process(target=_note_in_child, args=(5,))
    child.start()
    child.join(60)
    (failure,) = read_failures({os.getpid()})
    assert (failure.type, failure.message, failure.rank) == ("ValueError", "boom-17", 5)
    assert (failure.process_id, failure.engine_id) == (child.pid, os.getpid())


def test_the_engine_that_failed_last_and_the_one_that_was_started_last(folder: Path) -> None:
    older, newer, foreign = Engines(), Engines(), make_failure(50, 40, 40)
    failures.note_engines(older, [10])
    failures.note_engines(newer, [20])
    of_newer, of_older = make_failure(1, 20, 20), make_failure(2, 11, 10)
    for failure in (of_newer, of_older, foreign):
        note(failure)
    assert failures.read_failures_of_newest_engines() == [of_newer]
    assert failures.read_failures_of_last_engine() == [of_older]
    del older
    assert failures.read_failures_of_last_engine() == [of_newer]
    del newer
    assert failures.read_failures_of_last_engine() == failures.read_failures_of_newest_engines() == []


def test_an_error_is_told_the_first_failure_whole_and_the_others_by_their_headlines() -> None:
    error = RuntimeError("Engine core initialization failed.")
    first, second = make_failure(1, 11, 10), make_failure(2, 10, 10, type="OSError", message="clean-up")
    add_failures(error, [first, second])
    assert str(error) == (
        f"Engine core initialization failed.\nvllm-overlay: what failed first: {first.text}\nthen: {second.headline}"
    )
    untouched = RuntimeError("alone")
    add_failures(untouched, [])
    assert untouched.args == ("alone",)
