"""Prefix caching and chunked prefill as this vLLM has them by default, and what they mean for records."""

from __future__ import annotations

from collections.abc import Iterator

from vllm_overlay.check.installation import Installation
from vllm_overlay.check.line import Line

_OPTIONS = (
    (
        "prefix caching",
        ("vllm.config.cache:CacheConfig.enable_prefix_caching", "vllm.config:CacheConfig.enable_prefix_caching"),
        "rows of a cached prefix are taken from the records that computed it; a block filled before capture began, or"
        " loaded from outside, makes an incomplete record, which is marked",
    ),
    (
        "chunked prefill",
        (
            "vllm.config.scheduler:SchedulerConfig.enable_chunked_prefill",
            "vllm.config:SchedulerConfig.enable_chunked_prefill",
        ),
        "a prompt's rows come in several steps and are one record",
    ),
)


def check_caching(installation: Installation) -> Iterator[Line]:
    """One line for each. Errors: SourceError."""
    for subject, names, meaning in _OPTIONS:
        looks = [installation.definitions.find(name) for name in names]
        field = next((look.fields[0] for look in looks if look.fields), None)
        default = field.partition("=")[2] if field else ""
        state = {"True": "on", "False": "off"}.get(default, "settled by the engine" if field else "not read")
        yield Line(subject, "ok", "on or off: both are captured", f"{state} by default: {meaning}")
