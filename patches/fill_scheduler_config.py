"""A `SchedulerConfig` built without `max_model_len` or `is_encoder_decoder` gets what 0.11 gave it.

Why: both are required from 0.12.0 on. What was left out takes 0.11's value, not the newer release's: no asynchronous
scheduling, and prompts that are not split where a step has room for the longest one, so that a program may take a
step as whole prompts. Fields that 0.11 took as None (its "not set") are left out. What it does not change: calls that
name both, as vLLM's own do, and every field that the call names; one that the release dropped is refused.
"""

from __future__ import annotations

from typing import Any

import wrapt

from vllm_overlay.activation import count_old_call
from vllm_overlay.old_programs import note_config
from vllm_overlay.patch import Patch

# The first fields of 0.11, up to where 0.11.0 and 0.11.1 part. From 0.12.0 on the first is `max_model_len`, a number.
FIRST_FIELDS = ("runner_type", "max_num_batched_tokens", "max_num_seqs")
MAX_MODEL_LEN = 8192


def build(original: Any) -> Any:
    def fill(wrapped: Any, config: Any, args: Any, kwargs: Any) -> None:
        if not is_old_form(args, kwargs):
            wrapped(*args, **kwargs)
            return
        if len(args) > len(FIRST_FIELDS):
            raise TypeError("SchedulerConfig: name the fields after max_num_seqs; their order differs between releases")
        named = dict(zip(FIRST_FIELDS, args, strict=False)) | kwargs
        unknown = sorted(named.keys() - type(config).__dataclass_fields__.keys())
        if unknown:
            raise TypeError(f"SchedulerConfig of this release has no {', '.join(unknown)}")
        wrapped(**fill_as_0_11({name: value for name, value in named.items() if value is not None}, config))
        note_config(config)
        count_old_call(PATCH.name)

    return wrapt.FunctionWrapper(original, fill)


def is_old_form(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if args:
        return isinstance(args[0], str)
    return kwargs.get("max_model_len") is None or "is_encoder_decoder" not in kwargs


def fill_as_0_11(named: dict[str, Any], config: Any) -> dict[str, Any]:
    longest = named.setdefault("max_model_len", MAX_MODEL_LEN)
    named.setdefault("is_encoder_decoder", False)
    named.setdefault("async_scheduling", False)
    if not named.get("enable_chunked_prefill"):
        tokens = named.setdefault("max_num_batched_tokens", max(longest, config.DEFAULT_MAX_NUM_BATCHED_TOKENS))
        # 0.11.0 refused a call that has no room for the longest prompt; one from 0.11.1 relies on chunks.
        named.setdefault("enable_chunked_prefill", tokens < longest)
    return named


def verify() -> None:
    from vllm.config.scheduler import SchedulerConfig

    missing = [name for name in ("max_model_len", "is_encoder_decoder") if name not in SchedulerConfig.__annotations__]
    if missing or SchedulerConfig.__match_args__[0] != "max_model_len":
        raise RuntimeError(f"expected max_model_len and is_encoder_decoder, found {SchedulerConfig.__match_args__}")


PATCH = Patch(
    name="fill_scheduler_config",
    targets=("{SCHEDULER_CONFIG}:SchedulerConfig.__init__",),
    vllm=">=0.12",
    process="front end",
    relies_on={},
    upstream="none: vLLM promises nothing of its internals",
    remove_when="never: old programs stay as they are",
    build=build,
    verify=verify,
    old_form="SchedulerConfig(max_num_seqs=..., ...) of 0.11, without max_model_len or is_encoder_decoder",
)
