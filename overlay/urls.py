"""Which texts name a remote folder. Here, beside what is imported without torch, because the command line and the
settings ask as well as the store."""

from __future__ import annotations

import re

# s3://bucket/store, and fsspec's chains such as simplecache::s3://bucket/store.
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*(://|::)")


def is_url(text: str) -> bool:
    """Whether fsspec would be asked for it: to pathlib, it is a folder in the current one."""
    return _URL.match(text) is not None
