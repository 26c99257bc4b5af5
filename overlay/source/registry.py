"""vLLM's registry of models, read as text: which class serves an architecture."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from vllm_overlay.source.definitions import Definitions
from vllm_overlay.source.vllm_source import SourceError

MODULE = "vllm.model_executor.models.registry"

_MODELS = "vllm.model_executor.models"
_PREVIOUS = "_PREVIOUSLY_SUPPORTED_MODELS"
_OUT_OF_TREE = "_OOT_SUPPORTED_MODELS"


@dataclass(frozen=True)
class Entry:
    """A row of a table, such as `_TEXT_GENERATION_MODELS`: the module and the class; `line` is in the registry."""

    table: str
    module: str
    name: str
    line: int


@dataclass(frozen=True)
class Registry:
    """`entries` by architecture. `previous`: those that vLLM served until a release. `elsewhere`: a plug-in's page."""

    entries: Mapping[str, Entry]
    previous: Mapping[str, str]
    elsewhere: Mapping[str, str]


def read_registry(definitions: Definitions) -> Registry:
    """All tables of the registry. Errors: SourceError when there is no registry where all releases so far have it."""
    entries: dict[str, Entry] = {}
    strings: dict[str, dict[str, str]] = {}
    for table, rows in _list_tables(definitions):
        for architecture, value in rows:
            words = [one.value for one in ast.walk(value) if isinstance(one, ast.Constant) and type(one.value) is str]
            if isinstance(value, ast.Tuple) and len(words) >= 2:
                module = words[0] if words[0].startswith("vllm.") else f"{_MODELS}.{words[0]}"
                entries[architecture] = Entry(table, module, words[1], value.lineno)
            elif len(words) == 1:
                strings.setdefault(table, {})[architecture] = words[0]
    if not entries:
        raise SourceError(f"expected tables of architectures in {MODULE}, found none")
    return Registry(entries, strings.get(_PREVIOUS, {}), strings.get(_OUT_OF_TREE, {}))


def _list_tables(definitions: Definitions) -> Iterator[tuple[str, list[tuple[str, ast.expr]]]]:
    for statement in definitions.read_module(MODULE):
        if not isinstance(statement, ast.Assign | ast.AnnAssign) or not isinstance(statement.value, ast.Dict):
            continue
        target = statement.targets[0] if isinstance(statement, ast.Assign) else statement.target
        pairs = zip(statement.value.keys, statement.value.values, strict=True)
        rows = [(key.value, value) for key, value in pairs if isinstance(key, ast.Constant) and type(key.value) is str]
        yield ast.unparse(target), rows
