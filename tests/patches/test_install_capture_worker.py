"""Every configuration of workers names our extension, composed with the user's."""

from __future__ import annotations

import importlib

from tests.patches.conftest import Apply
from vllm_overlay.capture.extension import COMPOSED, EXTENSION
from vllm_overlay.patches.install_capture_worker import PATCH


def test_the_extension_is_installed(apply: Apply) -> None:
    from vllm.config import ParallelConfig

    assert ParallelConfig().worker_extension_cls == ""
    apply(PATCH)
    assert ParallelConfig().worker_extension_cls == EXTENSION


def test_the_users_extension_is_composed_with_ours(apply: Apply) -> None:
    from vllm.config import ParallelConfig

    apply(PATCH)
    name = ParallelConfig(worker_extension_cls="collections.UserDict").worker_extension_cls
    assert name.startswith(COMPOSED)
    module, _, attribute = name.rpartition(".")  # as vLLM resolves it
    extension = getattr(importlib.import_module(module), attribute)
    assert [base.__name__ for base in extension.__bases__] == ["CaptureExtension", "UserDict"]
