"""A small config.json of the same architecture: few layers of each kind, few heads and experts, few tokens.

By what fields are called and mean, with no table of architectures: a configuration that nobody here has seen is made
small as far as its fields are known, and the rest of it stays as it is.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm_overlay.model_shape import LAYERS, ConfigError, find_text_config, read_size
from vllm_overlay.rehearsal.depth import choose_layers, list_fields
from vllm_overlay.rehearsal.fields import Change, copy_of, is_tower, list_changes, set_at
from vllm_overlay.rehearsal.plan import MAX_LENGTH, TOKENS
from vllm_overlay.rehearsal.towers import shrink_tower
from vllm_overlay.rehearsal.widths import VOCABULARY, list_small_sizes, read_sizes

QUANTISED = ("quantization_config", "compression_config")

# What the rehearsal's prompts need, which is not made larger.
_LEAST = (("vocab_size", TOKENS.stop), ("max_position_embeddings", MAX_LENGTH), ("n_positions", MAX_LENGTH))
_TOKEN = re.compile(r"_token_(id|ids|index)$")


@dataclass(frozen=True)
class Small:
    """The small configuration. `layers` are those of the whole model that it keeps, 0-based; `special_ids` are token
    ids that the model gives a meaning of its own; `quantised` names the methods of quantisation that were taken out;
    `changes` are the fields that have another value, or none."""

    config: Mapping[str, Any]
    layers: tuple[int, ...]
    special_ids: tuple[int, ...]
    quantised: tuple[str, ...]
    changes: tuple[Change, ...]


def shrink(config: Mapping[str, Any]) -> Small:
    """The small configuration of a whole one. Errors: ConfigError for sizes that are none, or too small already."""
    key, text = find_text_config(config)
    count = read_size(text, LAYERS)
    if count is None:
        raise ConfigError(f"config.json has no {LAYERS[0]!r}: nothing says how many layers there are")
    _refuse_toys(text)
    kept = choose_layers(text, count)
    small = copy_of(config)
    small_text = small[key] if key else small
    _shrink_text(text, small_text, count, kept)
    if key:
        _copy_sizes(text, small_text, config, small)
    sizes = read_sizes(text)
    for name, value in config.items():
        if name != key and is_tower(name, value):
            small[name] = shrink_tower(value, sizes)
    quantised = _take_out_quantisation(small) + (_take_out_quantisation(small_text) if key else ())
    special = _renumber_tokens(small)
    return Small(small, kept, special, quantised, tuple(list_changes(config, small)))


def _refuse_toys(text: Mapping[str, Any]) -> None:
    for name, least in _LEAST:
        size = read_size(text, (name,))
        if size is not None and size < least:
            raise ConfigError(f"config.json: {name!r} is {size}, and the rehearsal's prompts need {least}")


def _shrink_text(text: Mapping[str, Any], small: dict[str, Any], count: int, kept: tuple[int, ...]) -> None:
    for path, value in list_small_sizes(text, read_sizes(text)):
        set_at(small, path, value)
    # Of what has a value for each layer, those of the layers that are kept; after the values have become small.
    for field in list_fields(small, count):
        set_at(small, field.path, field.keep(kept))
    for name in LAYERS:
        if text.get(name) == count:
            small[name] = len(kept)


def _copy_sizes(
    text: Mapping[str, Any], small_text: Mapping[str, Any], config: Mapping[str, Any], small: dict[str, Any]
) -> None:
    """What the whole configuration says once more beside the text model's."""
    for name, value in config.items():
        if isinstance(value, int) and name in text and text[name] == value:
            small[name] = small_text[name]


def _take_out_quantisation(part: dict[str, Any]) -> tuple[str, ...]:
    """Random weights are not quantised. Returns what the methods are called."""
    found = [part.pop(name) for name in QUANTISED if part.get(name)]
    return tuple(str(one.get("quant_method", "unnamed")) if isinstance(one, dict) else "unnamed" for one in found)


def _renumber_tokens(config: dict[str, Any]) -> tuple[int, ...]:
    """Give token ids above the small vocabulary new ones, from its end; equal ids stay equal. Returns all ids.

    Errors: ConfigError for more ids than it has.
    """
    fields = list(_list_tokens(config))
    found = {one for part, name in fields for one in _as_list(part[name])}
    free = [token for token in range(1, VOCABULARY) if token not in found]
    large = sorted((token for token in found if token >= VOCABULARY), reverse=True)
    if len(large) > len(free):
        raise ConfigError(f"config.json gives {len(found)} token ids a meaning: more than a small vocabulary holds")
    new = {token: token for token in found} | {token: free.pop() for token in large}
    for part, name in fields:
        value = part[name]
        part[name] = [new.get(one, one) for one in value] if isinstance(value, list) else new.get(value, value)
    return tuple(sorted(new.values()))


def _list_tokens(part: dict[str, Any]) -> list[tuple[dict[str, Any], str]]:
    found = [(part, name) for name, value in part.items() if _TOKEN.search(name) and _as_list(value)]
    for value in part.values():
        if isinstance(value, dict):
            found += _list_tokens(value)
    return found


def _as_list(value: Any) -> list[int]:
    """The token ids in a field; -1 and the like mean none."""
    values = value if isinstance(value, list) else [value]
    return [one for one in values if isinstance(one, int) and not isinstance(one, bool) and one >= 0]
