"""vLLM from 0.14.0 on: the engine's request ids are not the caller's. The rest as in 0.12.0."""

from __future__ import annotations

import re

from vllm_overlay.compat.since_0_12_0 import *  # noqa: F403

# The input processor appends "-" and eight hexadecimal digits to the caller's id, so that ids are unique.
_RANDOM_SUFFIX = re.compile(r"-[0-9a-f]{8}$")


def external_request_id(internal_id: str) -> str:
    """The id that the caller gave, from the engine's own."""
    return _RANDOM_SUFFIX.sub("", internal_id)
