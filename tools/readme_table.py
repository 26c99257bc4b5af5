"""A table of README.md that a tool writes: it stands between two comments."""

from __future__ import annotations


def replace_table(text: str, begin: str, table: str, end: str) -> str:
    """The README with another table between these comments. Errors: ValueError if they are not there."""
    return f"{text[: text.index(begin)]}{begin}\n\n{table}\n\n{text[text.index(end) :]}"
