"""The one error that a user's input can cause: one line that says what, where, and what to do."""

from __future__ import annotations


class OverlayError(Exception):
    """Something the user can put right. The command line prints it on one line and exits with status 1."""
