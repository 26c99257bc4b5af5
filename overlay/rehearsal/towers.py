"""Towers, which turn images or sounds into embeddings: fewer layers, and the small text model's width at their end."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from vllm_overlay.rehearsal.widths import Sizes

LAYERS = 2

_DEPTH = ("num_hidden_layers", "depth", "num_layers", "n_layers", "layers", "encoder_layers", "num_encoder_layers")
_INDICES = re.compile(r"(_indexes|_indices|_index)$")
_TO_TEXT = re.compile(r"^(out_hidden_size|mm_hidden_size|text_hidden_size|projection_dim|proj_dim|output_dim)$")


def shrink_tower(tower: Mapping[str, Any], sizes: Sizes) -> dict[str, Any]:
    """The tower's configuration with few layers. Its own widths stay: they fit each other as they are."""
    depth = next((tower[name] for name in _DEPTH if isinstance(tower.get(name), int)), 0)
    lists = {
        name: value
        for name, value in tower.items()
        if _INDICES.search(name) and isinstance(value, list) and all(isinstance(one, int) and one >= 0 for one in value)
    }
    small_depth = min(depth, max([LAYERS, *map(len, lists.values())]))
    small = dict(tower)
    for name, value in tower.items():
        if name in _DEPTH and value == depth:
            small[name] = small_depth
        elif name in lists:
            small[name] = list(range(len(value)))
        elif isinstance(value, list) and depth and len(value) == depth:
            small[name] = value[:small_depth]
        elif _leads_to_text(name, value, tower, sizes):
            small[name] = sizes.small_hidden
        elif isinstance(value, Mapping):
            small[name] = shrink_tower(value, sizes)
    return small


def _leads_to_text(name: str, value: Any, tower: Mapping[str, Any], sizes: Sizes) -> bool:
    """Qwen2-VL calls its tower's own width `embed_dim`, and what it hands on `hidden_size`."""
    names_text = _TO_TEXT.search(name) is not None or (name == "hidden_size" and "embed_dim" in tower)
    return names_text and bool(value == sizes.hidden)
