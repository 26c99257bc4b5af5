"""vLLM from 0.25.0 on: models spread the residual stream itself over ranks, and the CPU decodes speculatively. The rest
as in 0.24.0."""

from __future__ import annotations

from typing import Any

from vllm_overlay.compat import since_0_24_0
from vllm_overlay.compat.since_0_24_0 import *  # noqa: F403

# It is there from 0.20 on, and of the releases before, an EAGLE-3 draft only runs in 0.22: see README's support table.
SPECULATIVE_DECODING_ON_CPU = True


def sharding_option(vllm_config: Any) -> str | None:
    """As in 0.24.0; DeepSeek's layers hand on a part of the stream where experts run sequence-parallel."""
    if vllm_config.parallel_config.use_sequence_parallel_moe:
        return "enable_expert_parallel with both tensor and data parallelism"
    return since_0_24_0.sharding_option(vllm_config)
