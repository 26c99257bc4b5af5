"""The `VLLM_OVERLAY_*` variables, validated when they are read."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from vllm_overlay.errors import OverlayError
from vllm_overlay.urls import is_url

SWITCH = "VLLM_OVERLAY"
PREFIX = "VLLM_OVERLAY_"

VARIABLES: Mapping[str, str] = {
    "VLLM_OVERLAY": "1 switches the overlay on; unset or 0 leaves vLLM stock",
    "VLLM_OVERLAY_CAPTURE": "store folder; turns the capture of hidden states on",
    "VLLM_OVERLAY_LAYERS": "eagle3 (default), all, or layer ids such as 2,15,27,30",
    "VLLM_OVERLAY_TOKENS": "all (default), prompt or last (of the prompt): which rows of a request are kept",
    "VLLM_OVERLAY_DTYPE": "auto (default): rows are stored in the dtype the model runs in; fp8: in 8 bits",
    "VLLM_OVERLAY_SAMPLE": "fraction of requests to capture, 0..1 (default 1)",
    "VLLM_OVERLAY_POLICY": "strict (default) or warn: a vLLM newer than all supported ones, a draft of another target",
    "VLLM_OVERLAY_RELEASE": "the supported vLLM release that a development build stands for",
    "VLLM_OVERLAY_LEDGER": "folder in which every process writes what was patched in it",
}


class SettingsError(OverlayError):
    """A `VLLM_OVERLAY_*` variable that is unknown or has a value outside its range."""


@dataclass(frozen=True)
class Settings:
    """What the environment asks for. `capture` is None when capture is off."""

    enabled: bool
    capture: Path | None
    layers: str
    tokens: str
    dtype: str
    sample: float
    policy: str
    release: str | None
    ledger: Path | None


def is_enabled(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether the overlay is switched on. Errors: SettingsError for anything but `1`, `0`, empty or unset."""
    value = environ.get(SWITCH, "0")
    if value in ("", "0"):
        return False
    if value != "1":
        raise SettingsError(f"{SWITCH}={value!r} is neither 1 (on) nor 0 (off): set one of them")
    return True


def read_settings(environ: Mapping[str, str] = os.environ) -> Settings:
    """Read and check every `VLLM_OVERLAY_*` variable. Errors: SettingsError naming the variable and what it takes."""
    _refuse_unknown(environ)
    capture = environ.get("VLLM_OVERLAY_CAPTURE") or None
    ledger = environ.get("VLLM_OVERLAY_LEDGER") or None
    return Settings(
        enabled=is_enabled(environ),
        capture=_local_folder("VLLM_OVERLAY_CAPTURE", capture) if capture else None,
        layers=_layers(environ),
        tokens=_choose(environ, "VLLM_OVERLAY_TOKENS", ("all", "prompt", "last")),
        dtype=read_dtype(environ),
        sample=_fraction(environ, "VLLM_OVERLAY_SAMPLE"),
        policy=_choose(environ, "VLLM_OVERLAY_POLICY", ("strict", "warn")),
        release=environ.get("VLLM_OVERLAY_RELEASE") or None,
        ledger=Path(ledger).absolute() if ledger else None,
    )


def read_dtype(environ: Mapping[str, str] = os.environ) -> str:
    """What rows are stored in: `auto` or `fp8`. Errors: SettingsError for anything else."""
    return _choose(environ, "VLLM_OVERLAY_DTYPE", ("auto", "fp8"))


def parse_layers(text: str) -> str | tuple[int, ...]:
    """`eagle3`, `all`, or ids separated by commas, in the order of the columns wanted.

    Errors: SettingsError for anything else, a negative id, or an id named twice.
    """
    text = text.strip()
    if text in ("eagle3", "all"):
        return text
    try:
        ids = tuple(int(word) for word in text.split(","))
    except ValueError:
        raise SettingsError(
            f"layers {text!r} are neither 'eagle3', 'all', nor ids separated by commas such as 2,15,27,30"
        ) from None
    if min(ids) < 0:
        raise SettingsError(
            f"layers {text!r} hold a negative id: ids run from 0 (embeddings) to N (after the last layer)"
        )
    if len(set(ids)) != len(ids):
        raise SettingsError(f"layers {text!r} name an id twice: every id is one column of the store")
    return ids


def _refuse_unknown(environ: Mapping[str, str]) -> None:
    for name in sorted(environ):
        if not name.startswith(PREFIX) or name in VARIABLES:
            continue
        near = difflib.get_close_matches(name, VARIABLES, n=1, cutoff=0.0)
        raise SettingsError(f"unknown variable {name}: did you mean {near[0]}? Known are {', '.join(VARIABLES)}")


def _choose(environ: Mapping[str, str], name: str, allowed: tuple[str, ...]) -> str:
    value = environ.get(name) or allowed[0]
    if value not in allowed:
        raise SettingsError(f"{name}={value!r} is not one of {', '.join(allowed)}")
    return value


def _local_folder(name: str, text: str) -> Path:
    if is_url(text):
        raise SettingsError(f"{name}={text!r} is remote, and a store is written where the engine runs: name a folder")
    return Path(text).absolute()


def _fraction(environ: Mapping[str, str], name: str) -> float:
    text = environ.get(name) or "1"
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0.0 <= value <= 1.0:
        raise SettingsError(f"{name}={text!r} is not a fraction between 0 and 1")
    return value


def _layers(environ: Mapping[str, str]) -> str:
    text = environ.get("VLLM_OVERLAY_LAYERS") or "eagle3"
    try:
        parse_layers(text)
    except SettingsError as error:
        raise SettingsError(f"VLLM_OVERLAY_LAYERS: {error}") from None
    return text
