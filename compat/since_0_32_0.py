"""vLLM from 0.32.0 on: the CPU decodes speculatively. The rest as in 0.26.0."""

from vllm_overlay.compat.since_0_26_0 import *  # noqa: F403

SPECULATIVE_DECODING_ON_CPU = True
