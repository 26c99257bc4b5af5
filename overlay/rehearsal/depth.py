"""Which layers a small model keeps: every kind of them, in the order of the whole model.

What kind a layer is, config.json says in five ways: a list with a value for each layer, a text with a character for
each, a list of the layers that are of a kind, a number of layers at the beginning or the end, and a period. The first
layers up to the one that completes the kinds are kept, and then periods need no change. Only where that would be too
many, and nothing is periodic, the first layer of each kind is taken instead.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm_overlay.rehearsal.fields import FieldPath, list_parts

FEWEST_LAYERS = 4
MOST_LAYERS = 12
# A list with more values than this says something of each layer, but no kind.
_MOST_KINDS = 6

_FIRST = (
    "first_k_dense_replace",
    "num_dense_layers",
    "n_dense_layers",
    "first_num_dense_layers",
    "moe_layer_start_index",
    "dense_mlp_idx",
)
# The last layer of a kind, or -1 for that of the whole model.
_UP_TO = ("moe_layer_end_index",)
_LAST = ("num_kv_shared_layers",)
_INDICES = re.compile(r"(layers|layer_ids|layer_idx|layer_indices|layers_enum|attn_idxs)$")
_PERIOD = re.compile(
    r"^(moe_layer_freq|moe_layer_frequency|decoder_sparse_step|interleave_moe_layer_step|full_attention_interval"
    r"|sliding_window_pattern|layer_group_size|\w+_layer_period|\w+_layer_interval|\w*every_n_layers|mamba_step)$"
)
_PATTERN = re.compile(r"pattern$")


@dataclass(frozen=True)
class Field:
    """A field that says something of each layer: `kinds` for each, and its value for the layers that are kept."""

    path: FieldPath
    kinds: tuple[str, ...]
    keep: Callable[[Sequence[int]], Any]
    is_period: bool = False


def choose_layers(text: Mapping[str, Any], count: int) -> tuple[int, ...]:
    """The layers (0-based) of the text model's `count` that are kept, in order."""
    fields = list_fields(text, count)
    said = [one.kinds for one in fields if len(set(one.kinds)) <= _MOST_KINDS or one.is_period]
    kinds = [tuple(column[layer] for column in said) for layer in range(count)]
    firsts = [kinds.index(kind) for kind in dict.fromkeys(kinds)]
    prefix = max(min(FEWEST_LAYERS, count), max(firsts) + 1)
    if prefix <= MOST_LAYERS or any(one.is_period for one in fields):
        return tuple(range(prefix))
    more = [layer for layer in range(count) if layer not in firsts]
    return tuple(sorted(firsts + more[: max(0, FEWEST_LAYERS - len(firsts))]))


def list_fields(text: Mapping[str, Any], count: int) -> list[Field]:
    """What the text model's configuration says of its layers."""
    return [
        field
        for path, part in list_parts(text)
        # What is inside an object of one layer goes with it.
        if not path or not path[-1].isdigit()
        for field in _list_part(path, part, count)
    ]


def map_layer_ids(ids: Sequence[int], count: int, kept: int) -> tuple[int, ...]:
    """The ids asked for, of `count` layers, in a model of `kept` layers, in their order; then the ids that are left.

    The embeddings stay the embeddings, the last layer the last, and what is between keeps its order.
    """
    between = sorted(layer_id for layer_id in ids if 0 < layer_id < count)
    small = {0: 0, count: kept}
    if len(between) < kept:
        small |= {layer_id: place for place, layer_id in enumerate(between, 1)}
    asked = [small[layer_id] for layer_id in ids if layer_id in small]
    return (*asked, *(layer_id for layer_id in range(kept + 1) if layer_id not in asked))


def _list_part(path: FieldPath, part: Mapping[str, Any], count: int) -> Iterator[Field]:
    base = _find_base(part, count)
    for name, value in part.items():
        field = _read_field((*path, name), value, count, base, part)
        if field is not None:
            yield field


def _read_field(path: FieldPath, value: Any, count: int, base: int, part: Mapping[str, Any]) -> Field | None:
    name = path[-1]
    if isinstance(value, list):
        return _read_list(path, value, count, base, _count_predicting(part))
    if isinstance(value, Mapping):
        return _read_objects(path, value, count)
    if isinstance(value, str):
        return _read_text(path, value, count, base)
    if not isinstance(value, int) or isinstance(value, bool):
        return None
    if name in _FIRST or (name == "max_window_layers" and part.get("use_sliding_window")):
        kinds = tuple(str(layer < value) for layer in range(count))
        return Field(path, kinds, lambda kept: sum(layer < value for layer in kept))
    if name in _LAST:
        kinds = tuple(str(layer >= count - value) for layer in range(count))
        return Field(path, kinds, lambda kept: sum(layer >= count - value for layer in kept))
    if name in _UP_TO and value >= 0:
        kinds = tuple(str(layer <= value) for layer in range(count))
        return Field(path, kinds, lambda kept: sum(layer <= value for layer in kept) - 1)
    if _PERIOD.search(name) and value > 1:
        return Field(path, tuple(str(layer % value) for layer in range(count)), lambda kept: value, is_period=True)
    return None


def _read_list(path: FieldPath, value: list[Any], count: int, base: int, more: int) -> Field | None:
    if count <= len(value) <= count + more:
        # Those above the count predict further tokens; they stay where they are, at the end.
        kinds = tuple(_name_kind(one) for one in value[:count])
        return Field(path, kinds, lambda kept: [*(value[layer] for layer in kept), *value[count:]])
    if _INDICES.search(path[-1]) and _is_indices(value, count + base):
        return _read_indices(path, value, count, base, lambda found: found)
    return None


def _read_objects(path: FieldPath, value: Mapping[str, Any], count: int) -> Field | None:
    """An object for each layer, or for some, under its number (Gemma 4's, as transformers 5.19 saves them)."""
    if not value or not all(isinstance(one, Mapping) for one in value.values()):
        return None
    if not all(re.fullmatch(r"[0-9]+", name) and int(name) < count for name in value):
        return None
    by_layer = {int(name): one for name, one in value.items()}
    width = min(map(len, value))
    kinds = tuple(_name_kind(by_layer.get(layer)) for layer in range(count))

    def keep(kept: Sequence[int]) -> dict[str, Any]:
        return {f"{place:0{width}d}": by_layer[layer] for place, layer in enumerate(kept) if layer in by_layer}

    return Field(path, kinds, keep)


def _name_kind(value: Any) -> str:
    """A layer's value as a text; of an object what is in it or not, for each layer may have sizes of its own."""
    return json.dumps(_keep_flags(value) if isinstance(value, Mapping) else value, sort_keys=True)


def _keep_flags(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _keep_flags(one) for name, one in value.items()}
    return value if value is None or isinstance(value, bool) else ""


def _count_predicting(part: Mapping[str, Any]) -> int:
    """The layers that predict further tokens, for which a list may have values too; not every model says how many."""
    said = part.get("num_nextn_predict_layers")
    return max(1, said) if isinstance(said, int) else 1


def _read_text(path: FieldPath, value: str, count: int, base: int) -> Field | None:
    if _PATTERN.search(path[-1]) and len(value) == count:
        return Field(path, tuple(value), lambda kept: "".join(value[layer] for layer in kept))
    if _INDICES.search(path[-1]) and re.fullmatch(r"\d+(,\d+)*", value):
        found = [int(word) for word in value.split(",")]
        return _read_indices(path, found, count, base, lambda kept: ",".join(map(str, kept)))
    return None


def _read_indices(
    path: FieldPath, found: Sequence[int], count: int, base: int, write: Callable[[list[int]], Any]
) -> Field:
    def keep(kept: Sequence[int]) -> Any:
        return write([place + base for place, layer in enumerate(kept) if layer + base in found])

    return Field(path, tuple(str(layer + base in found) for layer in range(count)), keep)


def _find_base(part: Mapping[str, Any], count: int) -> int:
    """1 where a list of layers names one that only counting from 1 has (Kimi-Linear's), else 0."""
    lists = [value for name, value in part.items() if _INDICES.search(name) and isinstance(value, list)]
    return int(any(count in value for value in lists if len(value) < count and _is_indices(value, count + 1)))


def _is_indices(value: list[Any], end: int) -> bool:
    return all(isinstance(one, int) and not isinstance(one, bool) and 0 <= one < end for one in value)
