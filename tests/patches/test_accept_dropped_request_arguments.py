"""Requests of older forms end on their token and use their structured output; newer forms are untouched."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from tests.patches.conftest import ApplyShim
from vllm_overlay.patches.accept_dropped_request_arguments import PATCH

EOS = 9


def params(**more: Any) -> Any:
    from vllm import SamplingParams

    return SamplingParams(**{"max_tokens": 8} | more)


def constrained() -> Any:
    from vllm.sampling_params import StructuredOutputsParams

    return params(structured_outputs=StructuredOutputsParams(regex="a+"))


def takes_eos() -> bool:
    from vllm.v1.request import Request

    return "eos_token_id" in inspect.signature(Request.__init__).parameters


def ends_on(request: Any, token: int) -> bool:
    """Whether the engine ends the request after this token; as the scheduler asks."""
    from vllm.v1.core.sched.utils import check_stop

    request.append_output_token_ids(token)
    return bool(check_stop(request, max_model_len=128))


@pytest.fixture
def old_calls(apply_shim: ApplyShim) -> Any:
    return apply_shim(PATCH)


def test_the_call_of_speculators_ends_on_its_token(old_calls: Any) -> None:
    from vllm.v1.request import Request, RequestStatus

    given = params(temperature=0.0)
    request = Request(
        request_id="req_0_0",
        prompt_token_ids=[1, 2, 3],
        sampling_params=given,
        pooling_params=None,
        eos_token_id=EOS,
        arrival_time=0.0,
    )
    assert not ends_on(request, EOS + 1)
    assert ends_on(request, EOS)
    assert request.status == RequestStatus.FINISHED_STOPPED
    assert request.arrival_time == 0.0
    assert old_calls() == (0 if takes_eos() else 1)


def test_requests_that_share_parameters_end_on_their_own_tokens(old_calls: Any) -> None:
    from vllm.v1.request import Request

    shared = params()
    first = Request("a", [1], shared, None, eos_token_id=EOS)
    second = Request("b", [1], shared, None, eos_token_id=EOS + 1)
    assert not ends_on(first, EOS + 1)
    assert ends_on(second, EOS + 1)
    assert ends_on(first, EOS)
    if not takes_eos():
        assert shared.eos_token_id is None


@pytest.mark.parametrize("more", [{"ignore_eos": True}, {}])
def test_no_end_of_sequence(old_calls: Any, more: dict[str, Any]) -> None:
    from vllm.v1.request import Request

    request = Request("a", [1], params(**more), None, eos_token_id=EOS if more else None)
    assert not ends_on(request, EOS)


def test_a_pooling_request_has_no_use_for_it(old_calls: Any) -> None:
    from vllm import PoolingParams
    from vllm.v1.request import Request

    assert Request("a", [1], None, PoolingParams(), eos_token_id=EOS).sampling_params is None


def test_a_structured_output_request_is_used_as_it_is(old_calls: Any) -> None:
    from vllm.v1.request import Request
    from vllm.v1.structured_output.request import StructuredOutputRequest

    sampling_params = constrained()
    given = StructuredOutputRequest(sampling_params.structured_outputs)
    given.reasoning_ended = True
    request = Request("a", [1], sampling_params, None, eos_token_id=EOS, structured_output_request=given)
    assert request.structured_output_request is given
    assert request.use_structured_output
    assert request.status.name.startswith("WAITING_FOR")
    assert old_calls() == 1


def test_one_without_constraints_constrains_nothing(old_calls: Any) -> None:
    from vllm.v1.request import Request, RequestStatus
    from vllm.v1.structured_output.request import StructuredOutputRequest

    given: Any = StructuredOutputRequest(None)
    request = Request("a", [1], params(), None, eos_token_id=EOS, structured_output_request=given)
    assert not request.use_structured_output
    assert request.status == RequestStatus.WAITING


def test_constraints_that_the_engine_would_not_see_are_refused(old_calls: Any) -> None:
    from vllm.v1.request import Request
    from vllm.v1.structured_output.request import StructuredOutputRequest

    given = StructuredOutputRequest(constrained().structured_outputs)
    with pytest.raises(ValueError, match="sampling_params has no structured_outputs"):
        Request("a", [1], params(), None, eos_token_id=EOS, structured_output_request=given)


def test_positional_arguments_of_0_11_0(old_calls: Any) -> None:
    from vllm.v1.request import Request
    from vllm.v1.structured_output.request import StructuredOutputRequest

    sampling_params = constrained()
    given = StructuredOutputRequest(sampling_params.structured_outputs)
    request = Request("a", [1], sampling_params, None, EOS, 3, 1.5, None, None, None, given, "salt", 4)
    assert (request.client_index, request.arrival_time) == (3, 1.5)
    assert request.structured_output_request is given
    assert (request.cache_salt, request.priority) == ("salt", 4)
    assert ends_on(request, EOS)
    unconstrained = Request("b", [1], params(), None, EOS, 3, 1.5, None, None, None, None, "salt", 4)
    assert (unconstrained.cache_salt, unconstrained.priority) == ("salt", 4)
    assert old_calls() == 2


def test_positional_arguments_of_0_11_1_to_0_16(old_calls: Any) -> None:
    from vllm.v1.request import Request

    request = Request("a", [1], params(), None, EOS, 3, 1.5, None, None, None, "salt", 4)
    assert (request.client_index, request.arrival_time) == (3, 1.5)
    assert (request.cache_salt, request.priority) == ("salt", 4)
    assert ends_on(request, EOS)
    assert old_calls() == (0 if takes_eos() else 1)


def test_the_fifth_is_told_by_what_goes_with_it(old_calls: Any) -> None:
    from vllm.v1.request import Request

    if takes_eos():
        pytest.skip("the fifth argument is the token here")
    assert Request("a", [1], params(), None, 3, 1.5).client_index == 3
    assert Request("a", [1], params(), None, 3, None).client_index == 3
    assert old_calls() == 0
    assert Request("a", [1], params(), None, None).client_index == 0
    assert ends_on(Request("a", [1], params(), None, EOS, 3), EOS)
    assert ends_on(Request("a", [1], params(), None, EOS, client_index=3), EOS)
    assert old_calls() == 3
    with pytest.raises(TypeError, match="may be either: name it"):
        Request("a", [1], params(), None, EOS)
    mixed = Request("a", [1], params(), None, 3, 1.5, eos_token_id=EOS)
    assert (mixed.client_index, mixed.arrival_time) == (3, 1.5)
    assert ends_on(mixed, EOS)


def test_what_is_given_twice_is_refused(old_calls: Any) -> None:
    from vllm.v1.request import Request

    with pytest.raises(TypeError, match="one of them twice"):
        Request("a", [1], params(), None, EOS, 3, eos_token_id=EOS)


def test_the_newer_form_goes_straight_through(old_calls: Any) -> None:
    from vllm.v1.request import Request

    given = params()
    own = {"eos_token_id": None} if takes_eos() else {}
    request = Request(request_id="a", prompt_token_ids=[1], sampling_params=given, pooling_params=None, **own)
    assert request.sampling_params is given
    assert old_calls() == 0
