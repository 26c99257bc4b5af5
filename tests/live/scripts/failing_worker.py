"""A user's own worker class (`worker_cls`) that fails where and how a plan says.

`FAIL_AT` holds `load_model`, `init_device`, `step`, `call` or `shutdown`, or several with `+`; `FAIL_RANK` the rank
that fails (not set: all) and `FAIL_AS` the name of a function below. The file `FAIL_CLOCK` gets the time of it.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any, NoReturn

from vllm.v1.worker.cpu_worker import CPUWorker


class Particular(Exception):
    """An exception that cannot be made from a text, nor pickled."""

    def __init__(self, code: int, *, where: str) -> None:
        super().__init__(code)
        self.where = where
        self.callback = lambda: code

    def __str__(self) -> str:
        return f"particular {self.args[0]} at {self.where}"


class Unreadable(Exception):
    """An exception whose text cannot be had."""

    def __str__(self) -> str:
        raise TypeError("no text")


def value_error() -> NoReturn:
    raise ValueError("boom-17")


def bare_assert() -> None:
    assert False  # noqa: B011  what it is, is the question


def particular() -> NoReturn:
    raise Particular(17, where="here")


def unreadable() -> NoReturn:
    raise Unreadable


def empty_key() -> NoReturn:
    raise KeyError("")


def while_handled() -> NoReturn:
    try:
        raise KeyError("first-17")
    except KeyError:
        raise ValueError("second-18")  # noqa: B904  as it happens


class FailingWorker(CPUWorker):  # type: ignore[misc]
    def _fail_if_at(self, place: str) -> None:
        rank = os.environ.get("FAIL_RANK", str(self.rank))
        if place in os.environ["FAIL_AT"].split("+") and str(self.rank) == rank:
            Path(os.environ["FAIL_CLOCK"]).write_text(str(time.time()))
            globals()[os.environ["FAIL_AS"]]()

    def init_device(self) -> None:
        self._fail_if_at("init_device")
        super().init_device()

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        self._fail_if_at("load_model")

    def execute_model(self, *args: Any, **kwargs: Any) -> Any:
        self._fail_if_at("step")
        return super().execute_model(*args, **kwargs)

    def shutdown(self) -> None:
        if "shutdown" in os.environ["FAIL_AT"].split("+"):
            raise OSError("clean-up-99")
        super().shutdown()

    def fail(self) -> None:
        """Called by name, through `collective_rpc`."""
        self._fail_if_at("call")
