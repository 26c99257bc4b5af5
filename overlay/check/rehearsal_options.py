"""How a model is to be rehearsed: apart from the rehearsal, which a check that only reads does not import."""

from __future__ import annotations

from dataclasses import dataclass

SECONDS = 300.0


@dataclass(frozen=True)
class RehearsalOptions:
    """`seconds` in which it must end. `trust_remote_code`: run the Python files that lie beside config.json."""

    seconds: float = SECONDS
    trust_remote_code: bool = False
