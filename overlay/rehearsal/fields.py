"""The parts of a configuration: which of its objects describe the text model, and which a tower."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

FieldPath = tuple[str, ...]

_TOWER = re.compile(r"^(vision|visual|vit|audio|speech|sound|image|video|perceiver|dac|vae)", re.IGNORECASE)
# What is inside says nothing of the text model's sizes, or says it in units of a head.
_APART = re.compile(r"^(rope|quantization|compression|generation|auto_map|task_|id2label|label2id)")


@dataclass(frozen=True)
class Change:
    """A field that is another one in the small configuration; `old` or `new` is None where it is absent."""

    path: str
    old: Any
    new: Any


def is_tower(name: str, value: Any) -> bool:
    """Whether this field is the configuration of what turns images or sounds into embeddings."""
    return isinstance(value, Mapping) and _TOWER.search(name) is not None


def list_parts(text: Mapping[str, Any], path: FieldPath = ()) -> Iterator[tuple[FieldPath, Mapping[str, Any]]]:
    """The text model's configuration and the objects in it that are about the text model too."""
    yield path, text
    for name, value in text.items():
        if isinstance(value, Mapping) and not _TOWER.search(name) and not _APART.search(name):
            yield from list_parts(value, (*path, name))


def set_at(config: dict[str, Any], path: FieldPath, value: Any) -> None:
    """Set a field of a configuration that is ours."""
    for name in path[:-1]:
        config = config[name]
    config[path[-1]] = value


def copy_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration that can be changed."""
    return copy.deepcopy(dict(config))


def list_changes(old: Mapping[str, Any], new: Mapping[str, Any], path: str = "") -> Iterator[Change]:
    """Every field whose value differs, in the order of the old one."""
    for name, value in old.items():
        where = f"{path}{name}"
        if isinstance(value, Mapping) and isinstance(new.get(name), Mapping):
            yield from list_changes(value, new[name], f"{where}.")
        elif name not in new or new[name] != value:
            yield Change(where, value, new.get(name))
