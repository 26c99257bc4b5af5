"""The environment: our own settings, and vLLM's filter of plug-ins."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from vllm_overlay.activation import PLUGIN_NAME
from vllm_overlay.check.line import Line
from vllm_overlay.settings import PREFIX, SWITCH, Settings

_FILTER = "VLLM_PLUGINS"


def check_environment(settings: Settings, environ: Mapping[str, str]) -> Iterator[Line]:
    """What is set, and what vLLM would leave out."""
    names = sorted(name for name in environ if name == SWITCH or name.startswith(PREFIX))
    found = ", ".join(f"{name}={environ[name]}" for name in names) or "none set"
    expected = f"valid {PREFIX}* variables"
    if settings.capture is not None and not settings.enabled:
        yield Line("settings", "warning", expected, found, f"nothing is captured without {SWITCH}=1")
    else:
        yield Line("settings", "ok", expected, found)
    allowed = environ.get(_FILTER)
    if allowed is None:
        return
    expected = f"{PLUGIN_NAME} among the plug-ins that vLLM loads"
    if PLUGIN_NAME in [name.strip() for name in allowed.split(",")]:
        yield Line("plug-ins", "ok", expected, f"{_FILTER}={allowed}")
    else:
        advice = f"add {PLUGIN_NAME} to it, or processes started with `python -S` are not patched"
        yield Line("plug-ins", "warning", expected, f"{_FILTER}={allowed!r} leaves it out", advice)
