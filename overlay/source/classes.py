"""What a class of vLLM builds in its `__init__`, read with `ast`: the parts it keeps and the classes they are of.

A class may be named outright, be a class attribute (`self.model_cls`), or a parameter that a caller or a subclass
fills (`layer_type=GlmDecoderLayer`): the last two are followed, whatever else is not.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from vllm_overlay.source.bindings import Function, find_in_body
from vllm_overlay.source.definitions import Definitions, Found


@dataclass(frozen=True)
class Scope:
    """Where an expression stands: its module, the class that `self` is, and the parameters that hold a class."""

    module: str
    owner: Found
    parameters: Mapping[str, Found] = field(default_factory=dict)
    local_functions: Mapping[str, Function] = field(default_factory=dict)


@dataclass(frozen=True)
class Method:
    """A method as a class has it: its function, and the class that defines it."""

    owner: Found
    function: Function


def find_method(definitions: Definitions, found: Found, name: str) -> Method | None:
    """A class's own or inherited method. Errors: SourceError."""
    for one in definitions.list_lineage(found):
        member = find_in_body(_body(one), name)
        if isinstance(member, Function):
            return Method(one, member)
    return None


def list_initializers(
    definitions: Definitions, found: Found, given: Mapping[str, Found]
) -> Iterator[tuple[ast.AST, Scope]]:
    """The bodies of `__init__` that run for a class, its own first, with what `super().__init__` is given.

    A method that `__init__` calls for what it does, such as `self._init_layers(config)`, is one of them. `given`: the
    classes that the caller passes, by parameter. Errors: SourceError.
    """
    for one in definitions.list_lineage(found):
        function = find_in_body(_body(one), "__init__")
        if not isinstance(function, Function):
            continue
        scope = make_scope(definitions, one.module, found, function, given)
        yield function, scope
        for name in _list_own_calls(function):
            method = find_method(definitions, found, name)
            if method is not None:
                yield method.function, make_scope(definitions, method.owner.module, found, method.function, {})
        above = [node for node in ast.walk(function) if isinstance(node, ast.Call) and _is_super_init(node)]
        if not above:
            return
        given = read_class_arguments(definitions, above[0], scope)


def make_scope(
    definitions: Definitions, module: str, owner: Found, function: Function, given: Mapping[str, Found]
) -> Scope:
    """The scope of a function's body. Errors: SourceError."""
    arguments = function.args
    positional = [*arguments.posonlyargs, *arguments.args]
    pairs = list(zip(positional[len(positional) - len(arguments.defaults) :], arguments.defaults, strict=True))
    pairs += [
        (arg, default) for arg, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if default
    ]
    outer = Scope(module, owner)
    parameters = {arg.arg: one for arg, default in pairs if (one := resolve_class(definitions, default, outer))}
    local = {node.name: node for node in ast.walk(function) if isinstance(node, Function) and node is not function}
    return Scope(module, owner, {**parameters, **given}, local)


def resolve_class(definitions: Definitions, expression: ast.expr, scope: Scope) -> Found | None:
    """The class that an expression is; None if it is none or cannot be read. Errors: SourceError."""
    if isinstance(expression, ast.Name):
        return scope.parameters.get(expression.id) or definitions.find_class(scope.module, expression.id)
    if isinstance(expression, ast.Attribute) and isinstance(expression.value, ast.Name):
        if expression.value.id in ("self", "cls"):
            return _find_class_attribute(definitions, scope.owner, expression.attr)
        outer = definitions.follow(scope.module, expression.value.id)
        imported = getattr(outer.binding, "module", None) if outer else None
        return definitions.find_class(imported, expression.attr) if isinstance(imported, str) else None
    return None


def read_class_arguments(definitions: Definitions, call: ast.Call, scope: Scope) -> dict[str, Found]:
    """The keyword arguments of a call that are classes. Errors: SourceError."""
    named = [(keyword.arg, keyword.value) for keyword in call.keywords if keyword.arg]
    return {name: one for name, value in named if (one := resolve_class(definitions, value, scope))}


def list_parts(function: ast.AST) -> Iterator[tuple[list[str], ast.expr]]:
    """What a function keeps on `self`: the attributes of each assignment, and the value."""
    for node in ast.walk(function):
        if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
            continue
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        attributes = [name for target in targets for name in _name_attributes(target)]
        if attributes:
            yield attributes, node.value


def _name_attributes(target: ast.expr) -> list[str]:
    if isinstance(target, ast.Tuple):
        return [name for element in target.elts for name in _name_attributes(element)]
    is_own = isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id == "self"
    return [target.attr] if is_own and isinstance(target, ast.Attribute) else []


def _find_class_attribute(definitions: Definitions, owner: Found, name: str) -> Found | None:
    for one in definitions.list_lineage(owner):
        member = find_in_body(_body(one), name)
        if isinstance(member, ast.Assign | ast.AnnAssign) and member.value is not None:
            return resolve_class(definitions, member.value, Scope(one.module, owner))
    return None


def _list_own_calls(function: Function) -> list[str]:
    """The methods that a function calls as statements."""
    calls = [node.value for node in ast.walk(function) if isinstance(node, ast.Expr)]
    called = [ast.unparse(call.func) for call in calls if isinstance(call, ast.Call)]
    names = [name.removeprefix("self.") for name in called if name.startswith("self.")]
    return [name for name in names if name.isidentifier()]


def _is_super_init(node: ast.Call) -> bool:
    return ast.unparse(node.func) == "super().__init__"


def _body(found: Found) -> ast.ClassDef:
    assert isinstance(found.binding, ast.ClassDef)
    return found.binding
