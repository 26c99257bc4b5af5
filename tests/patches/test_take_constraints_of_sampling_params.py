"""A structured-output request of 0.11.0's form holds the constraints of its sampling parameters."""

from __future__ import annotations

from typing import Any

from tests.patches.conftest import ApplyShim
from vllm_overlay.patches.accept_dropped_request_arguments import PATCH as REQUEST
from vllm_overlay.patches.take_constraints_of_sampling_params import PATCH


def test_both_forms(apply_shim: ApplyShim) -> None:
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams
    from vllm.v1.request import Request
    from vllm.v1.structured_output.request import StructuredOutputRequest

    old_calls = apply_shim(PATCH)
    apply_shim(REQUEST)
    constraints = StructuredOutputsParams(regex="a+")
    assert StructuredOutputRequest(constraints).params is constraints
    assert StructuredOutputRequest(params=constraints).params is constraints
    assert old_calls() == 0
    given = SamplingParams(structured_outputs=constraints)
    forms: list[Any] = [StructuredOutputRequest(given), StructuredOutputRequest(sampling_params=given)]
    assert [form.params for form in forms] == [given.structured_outputs] * 2
    assert forms[0].structured_output_key == StructuredOutputRequest(constraints).structured_output_key
    assert old_calls() == 2
    request = Request("a", [1], given, None, eos_token_id=5, structured_output_request=forms[1])
    assert request.structured_output_request is forms[1]
    unconstrained: Any = StructuredOutputRequest(sampling_params=SamplingParams())
    plain = Request("b", [1], SamplingParams(), None, eos_token_id=5, structured_output_request=unconstrained)
    assert not plain.use_structured_output
