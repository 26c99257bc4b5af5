"""A line of the report."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Verdict = Literal["ok", "warning", "fails"]


@dataclass(frozen=True)
class Line:
    """What was expected of a subject, what was found, and what to do (empty if there is nothing).

    `details` are lines to be shown as they are, such as an error with its traceback.

    `fails`: the run would fail. `warning`: it would not, or that cannot be read, and the reader should know.
    """

    subject: str
    verdict: Verdict
    expected: str
    found: str
    advice: str = ""
    details: str = ""
