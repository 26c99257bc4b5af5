"""The token that ends a request is read from the request."""

from __future__ import annotations

from tests.patches.conftest import ApplyShim
from vllm_overlay.patches.accept_dropped_request_arguments import PATCH as REQUEST
from vllm_overlay.patches.keep_eos_token_id_of_requests import PATCH


def test_it_is_what_was_given(apply_shim: ApplyShim) -> None:
    old_calls = apply_shim(PATCH)
    apply_shim(REQUEST)
    from vllm import PoolingParams, SamplingParams
    from vllm.v1.request import Request

    request = Request("a", [1], SamplingParams(), None, eos_token_id=5)
    assert old_calls() == 0
    assert request.eos_token_id == 5
    assert Request("a", [1], SamplingParams(), None, eos_token_id=None).eos_token_id is None
    assert Request("a", [1], None, PoolingParams()).eos_token_id is None
    assert old_calls() == 3
