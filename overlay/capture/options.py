"""What a single request may say of its capture: `SamplingParams(extra_args={"overlay": {...}})`.

Over HTTP the same goes under `vllm_xargs`, whose values are strings and numbers: there `overlay` is JSON text.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from typing import Any

logger = logging.getLogger("vllm_overlay.capture")

KNOWN = ("capture", "tag", "loss_spans")


@dataclass(frozen=True)
class RequestOptions:
    """`loss_spans` are (start, end) positions under the loss, as the `capture` command hands them from a dataset."""

    capture: bool = True
    tag: str | None = None
    loss_spans: tuple[tuple[int, int], ...] | None = None


def read_options(sampling_params: Any) -> RequestOptions:
    """The options of a request. One that cannot be read is captured with the defaults and logged as an error.

    It is not raised: a worker that raises ends the engine, and one client's typing error must not end everybody's.
    """
    extra = getattr(sampling_params, "extra_args", None) or {}
    given = extra.get("overlay")
    if given is None:
        return RequestOptions()
    try:
        return _parse(json.loads(given) if isinstance(given, str) else given)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        logger.error("request option overlay=%r is ignored: %s", given, error)
        return RequestOptions()


def _parse(given: Any) -> RequestOptions:
    if not isinstance(given, dict):
        raise TypeError(f"expected an object with {', '.join(KNOWN)}, found {type(given).__name__}")
    unknown = sorted(set(given) - set(KNOWN))
    if unknown:
        raise ValueError(f"unknown {', '.join(unknown)}; known are {', '.join(KNOWN)}")
    capture, tag, spans = given.get("capture", True), given.get("tag"), given.get("loss_spans")
    if not isinstance(capture, bool):
        raise TypeError(f"capture must be true or false, found {capture!r}")
    if tag is not None and not isinstance(tag, str):
        raise TypeError(f"tag must be text, found {tag!r}")
    if tag is not None:
        tag.encode()  # a lone surrogate is a UnicodeEncodeError here, and not in the writer
    pairs = None if spans is None else tuple((int(start), int(end)) for start, end in spans)
    return RequestOptions(capture, tag, pairs)
