"""What a single request may say of its capture: `SamplingParams(extra_args={"overlay": {...}})`.

Over HTTP the same goes under `vllm_xargs`, whose values are strings and numbers: there `overlay` is JSON text.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from typing import Any

from vllm_overlay.capture.rows import END, WHOLE, Window

logger = logging.getLogger("vllm_overlay.capture")

KNOWN = ("capture", "tag", "tokens", "loss_spans")


@dataclass(frozen=True)
class RequestOptions:
    """`window`: the positions whose rows are kept, which a request gives as `tokens` (see find_window).

    `loss_spans` are (start, end) positions under the loss, as the `capture` command hands them from a dataset.
    """

    capture: bool = True
    tag: str | None = None
    loss_spans: tuple[tuple[int, int], ...] | None = None
    window: Window = WHOLE


def read_options(sampling_params: Any, num_prompt_tokens: int, tokens: str) -> RequestOptions:
    """The options of a request with a prompt of so many tokens; `tokens` holds if it says nothing of them.

    One whose options cannot be read is captured with the defaults and logged as an error. It is not raised: a worker
    that raises ends the engine, and one client's typing error must not end everybody's.
    """
    default = RequestOptions(window=find_window(tokens, num_prompt_tokens))
    extra = getattr(sampling_params, "extra_args", None) or {}
    given = extra.get("overlay")
    if given is None:
        return default
    try:
        return _parse(json.loads(given) if isinstance(given, str) else given, num_prompt_tokens, default)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        logger.error("request option overlay=%r is ignored: %s", given, error)
        return default


def find_window(tokens: Any, num_prompt_tokens: int) -> Window:
    """The positions that `tokens` names, in a request with a prompt of so many.

    "all"; "prompt"; "last", the last position of the prompt, whose state predicts the first generated token; or
    [start, end], positions start to end - 1. There a negative number counts from the end of the prompt (-1 is its last
    position), and an end of null is the end of the request. Errors: TypeError, ValueError for anything else and for a
    window that begins before the request or does not end after its start.
    """
    if tokens == "all":
        return WHOLE
    if tokens == "prompt":
        return Window(0, num_prompt_tokens)
    if tokens == "last":
        return Window(num_prompt_tokens - 1, num_prompt_tokens)
    if not _is_pair(tokens):
        raise TypeError(f"tokens must be all, prompt, last or [start, end] in whole numbers, found {tokens!r}")
    start, end = (_count_from_first(END if number is None else number, num_prompt_tokens) for number in tokens)
    if not 0 <= start < min(end, END):
        raise ValueError(
            f"tokens {list(tokens)!r} would be positions {start} up to {'the end' if tokens[1] is None else end} of a "
            f"request with {num_prompt_tokens} prompt tokens: there is no such window"
        )
    return Window(start, min(end, END))


def _is_pair(tokens: Any) -> bool:
    """Two whole numbers, the second of which may be None; True is no number."""
    if not isinstance(tokens, (list, tuple)) or len(tokens) != 2:
        return False
    start, end = tokens
    return type(start) is int and (end is None or type(end) is int)


def _count_from_first(position: int, num_prompt_tokens: int) -> int:
    return position + num_prompt_tokens if position < 0 else position


def _parse(given: Any, num_prompt_tokens: int, default: RequestOptions) -> RequestOptions:
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
    window = find_window(given["tokens"], num_prompt_tokens) if "tokens" in given else default.window
    return RequestOptions(capture, tag, pairs, window)
