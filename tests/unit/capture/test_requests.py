"""What the engine tells of ended requests, what a request may say of itself, and composed extensions."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_overlay.capture.composed import _compose
from vllm_overlay.capture.extension import EXTENSION, CaptureExtension, compose_extension
from vllm_overlay.capture.finished import FinishedRequest, FinishedRequests, close_workers, note_finished, take_finished
from vllm_overlay.capture.options import RequestOptions, find_window, read_options
from vllm_overlay.capture.rows import END, WHOLE, Window


class Scheduler:
    pass


def request(key: str, tokens: int) -> Any:
    return SimpleNamespace(request_id=key, num_tokens=tokens, get_finished_reason=lambda: "stop")


def test_facts_travel_with_the_ids_through_a_process_boundary() -> None:
    sent = FinishedRequests({"a"}, {"a": FinishedRequest(9, "length")})
    received = pickle.loads(pickle.dumps(sent))  # noqa: S301 - what vLLM does with a SchedulerOutput
    assert received == {"a"}
    assert received.facts == sent.facts


def test_what_the_last_steps_carried_is_told_again_at_the_end() -> None:
    """A signal may end the engine between a step's schedule and its work in the worker."""
    scheduler, calls = Scheduler(), []
    note_finished(scheduler, request("a", 5))
    assert take_finished(scheduler) == {"a": FinishedRequest(5, "stop")}
    assert take_finished(scheduler) == {}
    note_finished(scheduler, request("b", 7))
    executor = SimpleNamespace(collective_rpc=lambda method, timeout, args: calls.append((method, args)))
    close_workers(executor, scheduler)
    ((method, (told,)),) = calls
    assert method == "overlay_close"
    assert [one[:3] for one in told] == [("a", 5, "stop"), ("b", 7, "stop")]
    assert told[0][3] < told[1][3], "the second ended later"


def test_a_signal_while_workers_close_does_not_keep_it_from_them() -> None:
    """vLLM's handler of SIGTERM raises SystemExit once, here before the first call was sent."""
    scheduler, calls = Scheduler(), []
    note_finished(scheduler, request("a", 5))

    def call(method: str, timeout: float, args: Any) -> None:
        calls.append(args[0])
        if len(calls) == 1:
            raise SystemExit

    with pytest.raises(SystemExit):
        close_workers(SimpleNamespace(collective_rpc=call), scheduler)
    assert len(calls) == 2
    assert calls[0] == calls[1]


def options(overlay: Any, tokens: str = "all") -> RequestOptions:
    """Of a request with 10 prompt tokens, in an engine with this VLLM_OVERLAY_TOKENS."""
    return read_options(SimpleNamespace(extra_args={"overlay": overlay}), 10, tokens)


def test_options_of_a_request() -> None:
    assert read_options(None, 10, "all") == RequestOptions()
    assert options({"capture": False, "tag": "x"}) == RequestOptions(False, "x")
    assert options('{"tag": "over http"}') == RequestOptions(tag="over http")
    assert options({"loss_spans": [[1, 3], [5, 6]]}).loss_spans == ((1, 3), (5, 6))
    assert options({"tokens": [2, 5], "tag": "x"}) == RequestOptions(tag="x", window=Window(2, 5))


@pytest.mark.parametrize(
    ("tokens", "window"),
    [
        ("all", (0, END)),
        ("prompt", (0, 10)),
        ("last", (9, 10)),
        ([0, 1], (0, 1)),
        ([3, None], (3, END)),
        ([-1, None], (9, END)),
        ([-10, -1], (0, 9)),
        ([-4, 12], (6, 12)),
        ([40, 50], (40, 50)),
        ([0, 10**30], (0, END)),
    ],
)
def test_windows_of_a_request_with_ten_prompt_tokens(tokens: Any, window: tuple[int, int]) -> None:
    assert find_window(tokens, 10) == window
    assert options({"tokens": tokens}, tokens="last").window == window


@pytest.mark.parametrize(("tokens", "window"), [("all", WHOLE), ("prompt", (0, 10)), ("last", (9, 10))])
def test_a_request_that_says_nothing_of_tokens_has_the_engines_word(tokens: str, window: tuple[int, int]) -> None:
    assert read_options(None, 10, tokens).window == window
    assert options({"tag": "x"}, tokens) == RequestOptions(tag="x", window=Window(*window))


@pytest.mark.parametrize(
    ("tokens", "said"),
    [
        ([5, 5], "positions 5 up to 5 of a request with 10 prompt tokens: there is no such window"),
        ([7, 3], "positions 7 up to 3"),
        ([-11, None], "positions -1 up to the end"),
        ([0, -10], "positions 0 up to 0"),
        ([0, -11], "positions 0 up to -1"),
        ([10**30, None], "there is no such window"),
        ("first", "tokens must be all, prompt, last or"),
        (["prompt", 3], "in whole numbers"),
        ([1], "in whole numbers"),
        ([None, 3], "in whole numbers"),
        ([True, 3], "in whole numbers"),
        ([1.0, 3], "in whole numbers"),
        (None, "in whole numbers"),
        ({"start": 1}, "in whole numbers"),
    ],
)
def test_an_impossible_window_is_one_line_in_the_log_and_the_defaults(
    tokens: Any, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert options({"tokens": tokens, "tag": "x"}, tokens="prompt") == RequestOptions(window=Window(0, 10))
    (line,) = caplog.messages
    assert "is ignored" in line and said in line and "\n" not in line


@pytest.mark.parametrize(
    "wrong",
    [
        "{",
        3,
        {"captrue": False},
        {"capture": "no"},
        {"tag": 1},
        {"loss_spans": 7},
        {"loss_spans": [[0, float("inf")]]},
        "[" * 100_000,
        {"tag": "\ud800"},
    ],
)
def test_a_wrong_option_is_logged_and_the_engine_goes_on(wrong: Any, caplog: pytest.LogCaptureFixture) -> None:
    assert options(wrong) == RequestOptions()
    assert "is ignored" in caplog.text


class UsersExtension:
    def users_method(self) -> str:
        return "users"


def test_the_users_own_extension_is_kept() -> None:
    assert compose_extension("") == compose_extension(EXTENSION) == EXTENSION
    name = compose_extension(f"{__name__}.UsersExtension")
    assert compose_extension(name) == name
    module, _, attribute = name.rpartition(".")
    assert module == "vllm_overlay.capture.composed"
    assert bytes.fromhex(attribute.removeprefix("with_")).decode() == f"{__name__}.UsersExtension"


def test_a_composed_extension_has_both_sets_of_methods() -> None:
    composed = _compose("collections.UserDict")
    assert issubclass(composed, CaptureExtension)
    assert hasattr(composed, "overlay_flush")
    assert hasattr(composed, "update")
    assert composed is _compose("collections.UserDict")
