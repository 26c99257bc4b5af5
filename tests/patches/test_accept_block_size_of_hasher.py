"""A request's block hashes are the same under both names of the block size."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest

from tests.patches.conftest import ApplyShim, applied_shim
from vllm_overlay.patches.accept_block_size_of_hasher import PATCH


def test_both_names(apply_shim: ApplyShim, monkeypatch: pytest.MonkeyPatch) -> None:
    old_calls = apply_shim(PATCH)
    from vllm import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.request import Request

    def hashes(*args: Any, **kwargs: Any) -> list[bytes]:
        hasher = kv_cache_utils.get_request_block_hasher(*args, **kwargs)
        request = Request(
            request_id="a",
            prompt_token_ids=list(range(40)),
            sampling_params=SamplingParams(max_tokens=1),
            pooling_params=None,
            block_hasher=hasher,
        )
        return list(request.block_hashes)

    monkeypatch.setenv("PYTHONHASHSEED", "0")
    kv_cache_utils.init_none_hash(sha256)
    expected = hashes(16, sha256)
    assert len(expected) == 2
    assert hashes(hash_block_size=16, caching_hash_fn=sha256) == expected
    assert old_calls() == 0
    assert hashes(block_size=16, caching_hash_fn=sha256) == expected
    assert old_calls() == 1
    with pytest.raises(TypeError, match="block_size"):
        hashes(16, sha256, block_size=16)


def test_who_took_it_by_name_has_vllms_own_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """As vLLM's engine does, whose module is imported after the patch was applied."""
    from vllm.v1.core import kv_cache_utils

    original = kv_cache_utils.get_request_block_hasher
    user: Any = ModuleType("user")
    monkeypatch.setitem(sys.modules, "user", user)
    with applied_shim(PATCH):
        user.get_request_block_hasher = kv_cache_utils.get_request_block_hasher
        assert user.get_request_block_hasher is not original
    assert user.get_request_block_hasher is original
