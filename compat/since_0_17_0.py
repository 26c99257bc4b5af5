"""vLLM from 0.17.0 on: request ids may be left as the caller gave them. The rest as in 0.14.0."""

from __future__ import annotations

from vllm_overlay.compat import since_0_14_0
from vllm_overlay.compat.since_0_14_0 import *  # noqa: F403


def external_request_id(internal_id: str) -> str:
    """As in 0.14.0, unless the user asked vLLM to leave ids as they are."""
    from vllm import envs

    return internal_id if envs.VLLM_DISABLE_REQUEST_ID_RANDOMIZATION else since_0_14_0.external_request_id(internal_id)
