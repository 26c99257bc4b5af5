"""Signatures and fields as one line of text, and what such a line says."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Parameter:
    """A parameter by name. A required one has no default; `*args` and `**kwargs` are the kinds `args` and `kwargs`."""

    name: str
    kind: Literal["positional", "keyword only", "args", "kwargs"]
    default: str | None = None

    @property
    def is_required(self) -> bool:
        return self.default is None and self.kind in ("positional", "keyword only")


def list_parameters(signature: str) -> tuple[Parameter, ...]:
    """The parameters of a signature as `Definition` writes it, in their order."""
    function = ast.parse(f"def f{signature}: ...").body[0]
    assert isinstance(function, ast.FunctionDef)
    return tuple(_list_parameters(function.args))


def _list_parameters(arguments: ast.arguments) -> Iterator[Parameter]:
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(positional) - len(arguments.defaults)) + list(arguments.defaults)
    for arg, default in zip(positional, defaults, strict=True):
        yield Parameter(arg.arg, "positional", write_default(default))
    if arguments.vararg:
        yield Parameter(arguments.vararg.arg, "args")
    for arg, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        yield Parameter(arg.arg, "keyword only", write_default(default))
    if arguments.kwarg:
        yield Parameter(arguments.kwarg.arg, "kwargs")


def write_signature(arguments: ast.arguments) -> str:
    """`(self, block_size, log_stats=False, *, extra=...)`: no annotations, and no defaults but plain constants."""
    words: list[str] = []
    for parameter in _list_parameters(arguments):
        if parameter.kind == "keyword only" and not any(word.startswith("*") for word in words):
            words.append("*")
        stars = {"args": "*", "kwargs": "**"}.get(parameter.kind, "")
        words.append(stars + write_with_default(parameter.name, parameter.default))
    if arguments.posonlyargs:
        words.insert(len(arguments.posonlyargs), "/")
    return f"({', '.join(words)})"


def write_with_default(name: str, default: str | None) -> str:
    """As in a signature: `name` or `name=default`."""
    return name if default is None else f"{name}={default}"


def write_default(default: ast.expr | None) -> str | None:
    if default is None:
        return None
    constant = default.operand if isinstance(default, ast.UnaryOp) else default
    return ast.unparse(default) if isinstance(constant, ast.Constant) else "..."


def find_default(value: ast.expr | None) -> ast.expr | None:
    """A field's default: as it stands, or inside dataclasses' `field` and pydantic's `Field`. None: it is required."""
    if not isinstance(value, ast.Call) or ast.unparse(value.func).split(".")[-1] not in ("field", "Field"):
        return value
    keywords = {keyword.arg: keyword.value for keyword in value.keywords}
    if value.args or "default" in keywords:
        return value.args[0] if value.args else keywords["default"]
    # A factory, or a field that __init__ does not take: the caller need not give it.
    return value if "default_factory" in keywords or "init" in keywords else None
