"""speculators 0.3's KV cache is configured as vLLM 0.11 took it: no prefix cache, and blocks the attention can use.

Why: `CacheConfig` made by hand had prefix caching off until 0.12 and has it on since. speculators' requests carry no
block hashes, and vLLM asserts that a cached block has one; with hashes, a prefix that an earlier call computed would
not be computed again and its rows would be missing. It also asks for blocks of 16 tokens, which 0.11 changed to what
the attention takes, and 0.18 and later refuse in its place. What it does not change: vLLM's own configurations; only
the name that speculators imported is replaced.
"""

from __future__ import annotations

from typing import Any

import wrapt

from vllm_overlay.activation import count_old_call
from vllm_overlay.patch import Patch

CACHE_CONFIG = "speculators.data_generation.vllm_hidden_states_generator:CacheConfig"


def build(original: Any) -> Any:
    def make(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        count_old_call(PATCH.name)
        left = {name: value for name, value in kwargs.items() if name != "block_size"}
        return wrapped(*args, **({"enable_prefix_caching": False} | left))

    return wrapt.FunctionWrapper(original, make)


def verify() -> None:
    from vllm.config import CacheConfig

    if "enable_prefix_caching" not in CacheConfig.__dataclass_fields__:
        raise RuntimeError("expected CacheConfig.enable_prefix_caching, found no such field")


PATCH = Patch(
    name="configure_cache_as_0_11",
    targets=(CACHE_CONFIG,),
    vllm=">=0.12",
    process="any",
    relies_on={},
    upstream="none: the defaults are vLLM's choice",
    remove_when="nobody runs speculators 0.3 any more",
    build=build,
    verify=verify,
    old_form="CacheConfig(block_size=16), with prefix caching off",
    package="speculators==0.3.*",
)
