"""What the statements of a module or a class bind when they run, read with `ast`."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from vllm_overlay.source.signatures import find_default, write_default, write_with_default

Function = ast.FunctionDef | ast.AsyncFunctionDef

_PLATFORM_TEST = re.compile(r"current_platform\.(?:is_(\w+)\(\)|device_type == '(\w+)')")

# `config` is vLLM's own: a pydantic dataclass.
DATACLASS_DECORATORS = frozenset({"dataclass", "config"})


@dataclass(frozen=True)
class Import:
    """A binding made by an import: of a name in a module, or of the module (`name` is empty)."""

    module: str
    name: str


Binding = Function | ast.ClassDef | ast.Assign | ast.AnnAssign | Import


def list_bindings(body: Sequence[ast.stmt], package: str, platform: str = "") -> Iterator[tuple[str, Binding]]:
    """What these statements bind as the module is imported, in their order; a later one of the same name counts."""
    for statement in _run_at_import(body, platform):
        if isinstance(statement, Function | ast.ClassDef):
            yield statement.name, statement
        elif isinstance(statement, ast.ImportFrom):
            module = _resolve_relative(statement, package)
            yield from ((alias.asname or alias.name, Import(module, alias.name)) for alias in statement.names)
        elif isinstance(statement, ast.Import):
            for alias in statement.names:
                # `import a.b` binds a, `import a.b as c` binds a.b.
                top = alias.name.split(".")[0]
                yield alias.asname or top, Import(alias.name if alias.asname else top, "")
        elif isinstance(statement, ast.Assign | ast.AnnAssign):
            yield from ((name, statement) for name in _name_targets(statement))


def _run_at_import(body: Sequence[ast.stmt], platform: str) -> Iterator[ast.stmt]:
    """Statements with those inside `if`, `try` and `with`; the first branch last, because it counts."""
    for statement in body:
        if isinstance(statement, ast.If):
            holds = _evaluate(statement.test, platform)
            if not holds:
                yield from _run_at_import(statement.orelse, platform)
            if holds is not False:
                yield from _run_at_import(statement.body, platform)
        elif isinstance(statement, ast.Try):
            for handler in statement.handlers:
                yield from _run_at_import(handler.body, platform)
            yield from _run_at_import([*statement.body, *statement.orelse, *statement.finalbody], platform)
        elif isinstance(statement, ast.With):
            yield from _run_at_import(statement.body, platform)
        else:
            yield statement


def _evaluate(test: ast.expr, platform: str) -> bool | None:
    """Whether a condition holds at run time on a platform such as `cuda`; None if that cannot be read."""
    text = ast.unparse(test)
    if text in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
        return False
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        holds = _evaluate(test.operand, platform)
        return None if holds is None else not holds
    if isinstance(test, ast.BoolOp):
        parts = [_evaluate(value, platform) for value in test.values]
        decisive = isinstance(test.op, ast.Or)
        if decisive in parts:
            return decisive
        return None if None in parts else not decisive
    asked = _PLATFORM_TEST.fullmatch(text)
    return (asked[1] or asked[2]) == platform if asked and platform else None


def _resolve_relative(statement: ast.ImportFrom, package: str) -> str:
    if not statement.level:
        return statement.module or ""
    parts = package.split(".")
    parts = parts[: len(parts) - statement.level + 1]
    return ".".join([*parts, *filter(None, [statement.module])])


def _name_targets(statement: ast.Assign | ast.AnnAssign) -> list[str]:
    if isinstance(statement, ast.AnnAssign):
        return [statement.target.id] if isinstance(statement.target, ast.Name) and statement.value else []
    return [target.id for target in statement.targets if isinstance(target, ast.Name)]


def name_bases(body: ast.ClassDef) -> tuple[str, ...]:
    """The base classes as written, without what is in brackets behind them."""
    return tuple(ast.unparse(base.value if isinstance(base, ast.Subscript) else base) for base in body.bases)


def find_in_body(body: ast.ClassDef, name: str) -> Binding | None:
    """What the class itself has under this name, a dataclass's own `__init__` included; not what it inherits."""
    members = dict(list_bindings(body.body, ""))
    if name in members:
        return members[name]
    if name == "__init__" and name_decorators(body) & DATACLASS_DECORATORS:
        return _make_initializer(body)
    return next((field for field in _list_annotated(body) if ast.unparse(field.target) == name), None)


def _make_initializer(body: ast.ClassDef) -> Function:
    """The `__init__` that a dataclass gets from the fields in its body; those of its bases are not in it."""
    taken = [one for one in _list_annotated(body) if "init=False" not in ast.unparse(one.value or one.target)]
    words = [write_field(ast.unparse(one.target), one) for one in taken]
    first_default = next((index for index, word in enumerate(words) if "=" in word), len(words))
    if any("=" not in word for word in words[first_default:]):
        words.insert(0, "*")
    function = ast.parse(f"def __init__({', '.join(['self', *words])}): ...").body[0]
    assert isinstance(function, Function)
    function.lineno = body.lineno
    return function


def list_members(body: ast.ClassDef) -> list[str]:
    """The names of everything that stands in the class's body."""
    bound = [name for name, _ in list_bindings(body.body, "")]
    return bound + [ast.unparse(one.target) for one in _list_annotated(body)]


def _list_annotated(body: ast.ClassDef) -> list[ast.AnnAssign]:
    statements = [one for one in body.body if isinstance(one, ast.AnnAssign)]
    return [one for one in statements if not ast.unparse(one.annotation).startswith("ClassVar")]


def list_fields(body: ast.ClassDef) -> Iterator[str]:
    """The annotated attributes in the class's body, each `name` or `name=default`."""
    for statement in _list_annotated(body):
        yield write_field(ast.unparse(statement.target), statement)


def write_field(name: str, statement: ast.Assign | ast.AnnAssign) -> str:
    """A field as its class shows it: `name` or `name=default`."""
    return write_with_default(name, write_default(find_default(statement.value)))


def name_decorators(node: Function | ast.ClassDef) -> set[str]:
    """The decorators by their own names: `@functools.cache(...)` is `cache`."""
    return {ast.unparse(one).split("(")[0].split(".")[-1] for one in node.decorator_list}
