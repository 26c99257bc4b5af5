"""Worker extensions that are ours and the user's at once.

vLLM takes one qualified name and imports it in every worker, so the user's name travels in the attribute's name:
`with_<hexadecimal of the user's qualified name>`.
"""

from __future__ import annotations

import importlib
from functools import cache

from vllm_overlay.capture.extension import CaptureExtension


@cache
def _compose(users: str) -> type:
    module, _, name = users.rpartition(".")
    return type("CaptureExtensionWithUsers", (CaptureExtension, getattr(importlib.import_module(module), name)), {})


def __getattr__(name: str) -> type:
    prefix, _, encoded = name.partition("_")
    if prefix != "with" or not encoded:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _compose(bytes.fromhex(encoded).decode())
