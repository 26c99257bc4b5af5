"""The text model's sizes made small, each by what its name means.

The width of a head and what goes with it (rotary dimensions, latent ranks, the sizes of a state) stay as they are:
kernels take only some, and others follow from them. Fewer heads make the model narrow. What is not known stays too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from vllm_overlay.model_shape import ATTENTION_HEADS, HIDDEN, ConfigError, read_size
from vllm_overlay.rehearsal.fields import FieldPath, list_parts

HEADS = 4
KV_HEADS = 2
EXPERTS = 8
EXPERTS_PER_TOKEN = 2
VOCABULARY = 512
WINDOW = 64
# A table of so many positions for each rotary embedding, 128 wide in float32, is 64 MiB.
POSITIONS = 131_072
_MOST_POSITIONS = 1_048_576
# Of a model that does not say how many heads it has.
_HEAD_WIDTH = 64
_STEP = 64
# Who has one of these says how wide a head is.
_HEAD_WIDTHS = ("head_dim", "attention_head_dim", "kv_channels", "v_head_dim")

_HEAD_NAMES = re.compile(r"^(\w+_)?(num_attention_heads|n_heads?|num_heads|num_query_heads)$")
_KV_NAMES = re.compile(
    r"^(\w+_)?(num_key_value_heads|num_global_key_value_heads|num_kv_heads|n_head_kv|kv_n_heads|multi_query_group_num"
    r"|num_attention_groups)$"
)
_NO_ATTENTION = re.compile(r"^(linear|mamba|n_mamba|index|mtp|lightning)_")
_EXPERT_NAMES = re.compile(r"^(moe_)?(n_routed_experts|num_experts|num_local_experts|num_routed_experts)$")
_TOP_NAMES = re.compile(
    r"^(num_experts_per_tok(en)?|moe_k|moe_topk|moe_top_k|num_selected_experts|top_k_experts|num_experts_per_layer)$"
)
_PROPORTIONAL = re.compile(
    r"(intermediate_size\w*|ffn_dim|ffn_hidden_size|n_inner|q_lora_rank|share\w*_dim|lru_width)$"
)
_OF_HIDDEN = re.compile(r"(hidden_size|d_model|n_embd|_dim|width|embedding_size|conv_dim|block_dim)$")
_STATE_HEADS = ("mamba_n_heads", "mamba_num_heads", "n_mamba_heads")
_STATE_WIDTHS = ("mamba_d_head", "mamba_head_dim", "mamba_headdim")
_STATE_GROUPS = ("mamba_n_groups", "mamba_ngroups", "n_groups")


@dataclass(frozen=True)
class Sizes:
    """The text model's own sizes, and the width that the small one has."""

    hidden: int
    heads: int
    small_hidden: int
    small_heads: int


def read_sizes(text: Mapping[str, Any]) -> Sizes:
    """Errors: ConfigError for what is no size."""
    hidden = read_size(text, HIDDEN)
    if hidden is None:
        raise ConfigError(f"config.json has no {HIDDEN[0]!r}: nothing says how wide the model is")
    heads = read_size(text, ATTENTION_HEADS) or 0
    width = hidden // heads if heads and hidden % heads == 0 else _HEAD_WIDTH
    small_heads = min(heads, HEADS) if heads else HEADS
    small_hidden = small_heads * width
    if any(text.get(name) for name in _HEAD_WIDTHS):
        # The heads do not divide the hidden size then, and it is taken as kernels like it.
        small_hidden = -(-small_hidden // _STEP) * _STEP
    return Sizes(hidden, heads, min(hidden, small_hidden), small_heads)


def list_small_sizes(text: Mapping[str, Any], sizes: Sizes) -> Iterator[tuple[FieldPath, Any]]:
    """Each field that has another value in the small model, and the value."""
    for path, part in list_parts(text):
        for name, value in part.items():
            if isinstance(value, list) and any(isinstance(one, Mapping) for one in value):
                yield (*path, name), [_shrink_groups(one, sizes) for one in value]
            elif (rule := _find_rule(name, part, sizes)) is not None:
                yield (*path, name), _apply(rule, value)
        yield from ((((*path, name)), value) for name, value in _list_states(part, sizes))


def _shrink_groups(value: Any, sizes: Sizes) -> Any:
    """A layer's own object (DeciLM's): the query heads of one KV head become as few as all of them have."""
    if not isinstance(value, Mapping):
        return value
    most = max(1, sizes.small_heads // KV_HEADS)
    return {
        name: min(one, most) if name == "n_heads_in_group" and isinstance(one, int) else _shrink_groups(one, sizes)
        for name, one in value.items()
    }


Rule = Callable[[int], int]


def _apply(rule: Rule, value: Any) -> Any:
    """A number, or a list of them, one for each layer or kind; anything else stays."""
    if isinstance(value, list):
        return [_apply(rule, one) for one in value]
    return rule(value) if isinstance(value, int) and not isinstance(value, bool) and value > 0 else value


def _find_rule(name: str, part: Mapping[str, Any], sizes: Sizes) -> Rule | None:
    """How a field of this name becomes small; None if it stays."""
    for pattern, rule in _rules(part, sizes):
        if pattern.search(name):
            return rule
    return None


def _rules(part: Mapping[str, Any], sizes: Sizes) -> tuple[tuple[re.Pattern[str], Rule | None], ...]:
    """The first that fits counts."""
    return (
        (_NO_ATTENTION, None),
        (_HEAD_NAMES, lambda heads: heads if _is_state_space(part) else min(heads, HEADS)),
        (_KV_NAMES, lambda heads: _shrink_kv(heads, sizes)),
        (_EXPERT_NAMES, lambda experts: min(experts, EXPERTS)),
        (_TOP_NAMES, lambda experts: min(experts, EXPERTS_PER_TOKEN)),
        (re.compile(r"^(n_group|num_expert_group|router_n_groups)$"), lambda groups: min(groups, 2)),
        (re.compile(r"^topk_group$"), lambda groups: _shrink_top_groups(groups, part)),
        (re.compile(r"^zero_expert_num$"), lambda experts: min(experts, 2)),
        (re.compile(r"vocab_size"), lambda size: min(size, VOCABULARY)),
        (re.compile(r"^sliding_window(_size)?$"), lambda window: min(window, WINDOW)),
        (re.compile(r"^max_position_embeddings$"), lambda n: POSITIONS if n > _MOST_POSITIONS else n),
        (_PROPORTIONAL, lambda width: _scale(width, sizes)),
        (_OF_HIDDEN, lambda width: width // sizes.hidden * sizes.small_hidden if width % sizes.hidden == 0 else width),
    )


def _shrink_kv(heads: int, sizes: Sizes) -> int:
    """As many as there are query heads, one, or something between: each stays what it is."""
    return sizes.small_heads if heads >= sizes.heads else min(heads, KV_HEADS)


def _shrink_top_groups(groups: int, part: Mapping[str, Any]) -> int:
    every = _read(part, "n_group", "num_expert_group") or groups
    return min(every, 2) if groups >= every else 1


def _scale(width: int, sizes: Sizes) -> int:
    """In proportion to the hidden size, in whole steps unless it is a multiple of the hidden size."""
    if width % sizes.hidden == 0:
        return width // sizes.hidden * sizes.small_hidden
    scaled = -(-width * sizes.small_hidden // sizes.hidden)
    return min(width, -(-scaled // _STEP) * _STEP)


def _is_state_space(part: Mapping[str, Any]) -> bool:
    """Whether its `num_heads` are those of a state-space model without attention (Mamba 2)."""
    return "expand" in part and isinstance(part.get("num_heads"), int) and "num_attention_heads" not in part


def _list_states(part: Mapping[str, Any], sizes: Sizes) -> Iterator[tuple[str, int]]:
    """Linear attention and state-space layers: their heads fill a multiple of the hidden size, or are few.

    Errors: ConfigError for what is no size.
    """
    keys, values = _read(part, "linear_num_key_heads"), _read(part, "linear_num_value_heads")
    if keys and values:
        small = min(keys, 2)
        yield "linear_num_key_heads", small
        yield "linear_num_value_heads", small * max(1, values // keys)
    name, width = next((name for name in _STATE_HEADS if part.get(name)), None), _read(part, *_STATE_WIDTHS)
    if name is None and _is_state_space(part):
        name, width = "num_heads", _read(part, "head_dim")
    heads = _read(part, name) if name else None
    if name is None or heads is None:
        return
    expand = part.get("mamba_expand") or part.get("expand") or 2
    # Without a width the class divides, as it does where there is one that fits.
    fills = width is None or heads * width == expand * sizes.hidden
    small = heads * sizes.small_hidden // sizes.hidden if fills else min(heads, HEADS)
    yield name, max(1, small)
    for group in _STATE_GROUPS:
        if groups := _read(part, group):
            yield group, min(groups, 2) if small % 2 == 0 else 1
    if inner := _read(part, "mamba_d_ssm"):
        yield "mamba_d_ssm", max(1, small) * (width or inner // heads)


def _read(part: Mapping[str, Any], *names: str) -> int | None:
    """A size by the first of its names that says one; null and 0 say that there is none.

    Errors: ConfigError for what is no size.
    """
    return read_size({name: part[name] for name in names if part.get(name)}, names)
