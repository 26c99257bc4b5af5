"""The decoder layers of the class that serves a model: found, and how the model calls them, without importing it.

From the class in the registry down the parts that it builds, to the one that holds the layers. What cannot be read is
said in words and never guessed.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from vllm_overlay.source.bindings import Function
from vllm_overlay.source.classes import (
    Method,
    Scope,
    find_method,
    list_initializers,
    list_parts,
    make_scope,
    read_class_arguments,
    resolve_class,
)
from vllm_overlay.source.definitions import Definitions, Found
from vllm_overlay.source.registry import Registry
from vllm_overlay.source.residual import carries_residual
from vllm_overlay.source.signatures import Parameter, list_parameters, write_signature

# Vision and audio towers have layers of their own; the rest holds no layers.
NOT_TEXT = ("vision", "visual", "audio", "image", "tower", "projector", "sampler", "logits", "aligner")

_MAX_DEPTH = 6


@dataclass(frozen=True)
class LayerClass:
    """A kind of decoder layer. `parameters` are its forward's, without self.

    `returns` is what stands behind its `return`, such as `(hidden_states, residual)`; empty if they differ.
    `carries_residual`: it reads the residual that it is given, so that the stream is hidden states and residual.
    """

    name: str
    place: str
    signature: str
    parameters: tuple[Parameter, ...]
    returns: str
    carries_residual: bool


@dataclass(frozen=True)
class LoopCall:
    """How the model calls a layer: the call with the layer's variable named `layer`, and what takes its result."""

    text: str
    place: str
    result: str
    positional: tuple[str, ...]
    keywords: tuple[str, ...]
    has_stars: bool

    @property
    def style(self) -> str:
        """By position, by keyword, or both."""
        if self.positional and self.keywords:
            return "by position and keyword"
        return "by keyword" if self.keywords or not self.positional else "by position"


@dataclass(frozen=True)
class Decoder:
    """`path`: the attributes that lead to the layers, such as `language_model.model.layers`, and the classes that it
    goes `through`; `inner` is the last, which holds the layers. `unread`: what could not be read."""

    path: str
    through: tuple[str, ...]
    inner: Found
    kinds: tuple[LayerClass, ...]
    calls: tuple[LoopCall, ...]
    unread: tuple[str, ...] = ()


@dataclass(frozen=True)
class Unread:
    """The decoder layers were not found; `reasons` say where reading ended."""

    reasons: tuple[str, ...]


@dataclass
class _Search:
    definitions: Definitions
    registry: Registry
    text_architecture: str | None
    reasons: list[str] = field(default_factory=list)
    seen: set[str] = field(default_factory=set)


def find_decoder(
    definitions: Definitions, registry: Registry, served: Found, text_architecture: str | None
) -> Decoder | Unread:
    """The decoder layers under a class. `text_architecture` is the text model's as config.json names it, if it does.

    Errors: SourceError if a file cannot be parsed.
    """
    search = _Search(definitions, registry, text_architecture)
    found = _descend(search, served, {}, (), (served.name,))
    return found or Unread(tuple(search.reasons) or (f"no list of decoder layers in what {served.name} builds",))


def bind_call(call: LoopCall, kind: LayerClass) -> list[str]:
    """What of the call does not fit the layer's forward: one line each, none if it fits."""
    names = [one.name for one in kind.parameters]
    by_position = [one.name for one in kind.parameters if one.kind == "positional"]
    takes_more = any(one.kind == "args" for one in kind.parameters)
    takes_any_keyword = any(one.kind == "kwargs" for one in kind.parameters)
    misfits = []
    if len(call.positional) > len(by_position) and not takes_more:
        misfits.append(f"{len(call.positional)} arguments by position, {kind.name} takes {len(by_position)}")
    bound = dict(zip(by_position, call.positional, strict=False))
    for name in call.keywords:
        if name in bound:
            misfits.append(f"{name!r} both by position and by keyword")
        elif name not in names and not takes_any_keyword:
            misfits.append(f"a keyword {name!r} that {kind.name} does not take")
    if not call.has_stars:
        missing = [
            one.name
            for one in kind.parameters
            if one.is_required and one.name not in bound and one.name not in call.keywords
        ]
        misfits += [f"no {name!r}, which {kind.name} requires" for name in missing]
    crossed = [name for name, value in bound.items() if value != name and value in names and bound.get(value) != value]
    misfits += [f"{bound[name]!r} by position where {kind.name} takes {name!r}" for name in crossed]
    return misfits


def _descend(
    search: _Search, found: Found, given: Mapping[str, Found], path: tuple[str, ...], through: tuple[str, ...]
) -> Decoder | None:
    key = f"{found.name} {sorted((name, one.name) for name, one in given.items())}"
    if key in search.seen or len(path) > _MAX_DEPTH:
        return None
    search.seen.add(key)
    bodies = list_initializers(search.definitions, found, given)
    parts = [(attributes, value, scope) for body, scope in bodies for attributes, value in list_parts(body)]
    lists = [
        (attributes[-1], kinds)
        for attributes, value, scope in parts
        if (kinds := _read_list(search, value, scope)) is not None
    ]
    if lists:
        decoders = [_make_decoder(search, found, attribute, kinds, path, through) for attribute, kinds in lists]
        return min(decoders, key=lambda decoder: len(decoder.unread))
    # Some text models call their layers' holder an encoder; where there is a decoder too, that one is meant.
    parts.sort(key=lambda part: "encoder" in part[0][0].lower())
    for (name, *_), value, scope in parts:
        if any(word in name.lower() for word in NOT_TEXT):
            continue
        for child, arguments in _list_children(search, value, scope):
            decoder = _descend(search, child, arguments, (*path, name), (*through, child.name))
            if decoder is not None:
                return decoder
    return None


def _list_children(search: _Search, value: ast.expr, scope: Scope) -> Iterator[tuple[Found, dict[str, Found]]]:
    for node in ast.walk(value):
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        if called.endswith("init_vllm_registered_model"):
            child = _read_registered(search, node, scope)
            if child is not None:
                yield child, {}
            continue
        model_class = next((one.value for one in node.keywords if one.arg == "model_class"), node.func)
        child = resolve_class(search.definitions, model_class, scope)
        if child is not None:
            yield child, read_class_arguments(search.definitions, node, scope)
        elif called.startswith("self."):
            yield from _list_returned(search, node, scope, called.removeprefix("self."))


def _list_returned(
    search: _Search, call: ast.Call, scope: Scope, name: str
) -> Iterator[tuple[Found, dict[str, Found]]]:
    """The classes that a method such as `_init_model` makes and returns."""
    method = find_method(search.definitions, scope.owner, name) if name.isidentifier() else None
    if method is None:
        return
    given = read_class_arguments(search.definitions, call, scope)
    inside = make_scope(search.definitions, method.owner.module, scope.owner, method.function, given)
    for node in ast.walk(method.function):
        if isinstance(node, ast.Return) and isinstance(node.value, ast.Call):
            child = resolve_class(search.definitions, node.value.func, inside)
            if child is not None:
                yield child, read_class_arguments(search.definitions, node.value, inside)


def _read_registered(search: _Search, call: ast.Call, scope: Scope) -> Found | None:
    """The class behind `init_vllm_registered_model(architectures=[...])`."""
    keywords = {keyword.arg: keyword.value for keyword in call.keywords}
    named = keywords.get("architectures")
    literal = [one.value for one in ast.walk(named) if isinstance(one, ast.Constant)] if named else []
    architecture = literal[0] if literal and isinstance(named, ast.List) else search.text_architecture
    place = search.definitions.place(scope.module, call)
    if not isinstance(architecture, str):
        wanted = "the text config's architectures" if named is None else ast.unparse(named)
        search.reasons.append(f"{place} builds the text model of {wanted}, and config.json does not name them")
        return None
    entry = search.registry.entries.get(architecture)
    if entry is None:
        search.reasons.append(f"{place} builds the text model {architecture}, which this vLLM does not have")
        return None
    return search.definitions.find_class(entry.module, entry.name)


def _read_list(search: _Search, value: ast.expr, scope: Scope) -> tuple[Found, ...] | None:
    """The classes of the layers if the value makes the list of them: `make_layers(...)` or `nn.ModuleList([...])`."""
    if not isinstance(value, ast.Call):
        return None
    called = ast.unparse(value.func).split(".")[-1]
    if called == "make_layers":
        keywords = {keyword.arg: keyword.value for keyword in value.keywords}
        maker = keywords.get("layer_fn") or (value.args[1] if len(value.args) > 1 else None)
        kinds = tuple(dict.fromkeys(_list_made(search, maker, scope))) if maker is not None else ()
        if not kinds:
            search.reasons.append(f"the class of layers at {search.definitions.place(scope.module, value)}")
        return kinds
    if called == "ModuleList" and value.args and isinstance(value.args[0], ast.ListComp | ast.GeneratorExp):
        kinds = tuple(dict.fromkeys(_list_made(search, value.args[0].elt, scope)))
        return kinds if kinds and all(_is_named_as_layer(kind) for kind in kinds) else None
    return None


def _is_named_as_layer(found: Found) -> bool:
    return found.path.endswith(("Layer", "Block"))


def _list_made(search: _Search, maker: ast.expr, scope: Scope) -> Iterator[Found]:
    """The classes of what a lambda, a local function, a method or a call makes."""
    if isinstance(maker, ast.Lambda):
        yield from _list_made(search, maker.body, scope)
    elif isinstance(maker, ast.IfExp):
        yield from _list_made(search, maker.body, scope)
        yield from _list_made(search, maker.orelse, scope)
    elif isinstance(maker, ast.Name) and maker.id in scope.local_functions:
        yield from _list_made_by(search, scope.local_functions[maker.id], scope)
    elif isinstance(maker, ast.Name | ast.Attribute):
        method = None
        if isinstance(maker, ast.Attribute) and ast.unparse(maker.value) == "self":
            method = find_method(search.definitions, scope.owner, maker.attr)
        if method is not None:
            inside = Scope(method.owner.module, scope.owner, scope.parameters)
            yield from _list_made_by(search, method.function, inside)
            return
        found = resolve_class(search.definitions, maker, scope)
        if found is not None:
            yield found
    elif isinstance(maker, ast.Call):
        if ast.unparse(maker.func).split(".")[-1] == "partial" and maker.args:
            yield from _list_made(search, maker.args[0], scope)
        else:
            yield from _list_made(search, maker.func, scope)


def _list_made_by(search: _Search, function: Function, scope: Scope) -> Iterator[Found]:
    """The classes that a function makes and returns; a table of classes that it looks one up in is read whole."""
    assigned = {ast.unparse(node.targets[0]): node.value for node in ast.walk(function) if isinstance(node, ast.Assign)}
    for node in ast.walk(function):
        if not isinstance(node, ast.Return) or node.value is None:
            continue
        value = assigned.get(node.value.id, node.value) if isinstance(node.value, ast.Name) else node.value
        maker = value.func if isinstance(value, ast.Call) else value
        if isinstance(maker, ast.Name) and maker.id in assigned:
            maker = assigned[maker.id]
        yield from _list_chosen(search, maker, scope)


def _list_chosen(search: _Search, maker: ast.expr, scope: Scope) -> Iterator[Found]:
    if isinstance(maker, ast.Subscript) and isinstance(maker.value, ast.Name):
        table = search.definitions.follow(scope.module, maker.value.id)
        value = getattr(table.binding, "value", None) if table else None
        if table is not None and isinstance(value, ast.Dict):
            inside = Scope(table.module, scope.owner)
            found = [resolve_class(search.definitions, one, inside) for one in value.values]
            yield from (one for one in found if one is not None)
        return
    yield from _list_made(search, maker, scope)


def _make_decoder(
    search: _Search,
    inner: Found,
    attribute: str,
    kinds: Sequence[Found],
    path: tuple[str, ...],
    through: tuple[str, ...],
) -> Decoder:
    calls = tuple(dict.fromkeys(_list_calls(search.definitions, inner, attribute)))
    layers = tuple(_read_layer(search.definitions, kind) for kind in kinds)
    unread = [] if kinds else [search.reasons[-1]]
    if not calls:
        unread.append(f"how {inner.name} calls its layers: there is no loop over self.{attribute} in its methods")
    return Decoder(".".join((*path, attribute)), through, inner, layers, calls, tuple(unread))


def _read_layer(definitions: Definitions, kind: Found) -> LayerClass:
    method = find_method(definitions, kind, "forward")
    place = definitions.place(kind.module, kind.binding) if isinstance(kind.binding, ast.ClassDef) else ""
    if method is None:
        return LayerClass(kind.path, place, "", (), "", False)
    arguments = method.function.args
    signature = write_signature(arguments)
    parameters = list_parameters(signature)[1:]
    shown = signature.replace("(self, ", "(").replace("(self)", "()")
    return LayerClass(kind.path, place, shown, parameters, _read_returns(method), carries_residual(method.function))


def _read_returns(method: Method) -> str:
    inner = [node for node in ast.walk(method.function) if isinstance(node, Function) and node is not method.function]
    nested = {id(one) for function in inner for one in ast.walk(function)}
    returns = [node for node in ast.walk(method.function) if isinstance(node, ast.Return) and id(node) not in nested]
    texts = {ast.unparse(node.value) if node.value else "None" for node in returns}
    return texts.pop() if len(texts) == 1 else ""


def _list_calls(definitions: Definitions, inner: Found, attribute: str) -> Iterator[LoopCall]:
    """The calls of the layers: in forward, or else in the first other method that loops over them."""
    methods: dict[str, Method] = {}
    for one in definitions.list_lineage(inner):
        assert isinstance(one.binding, ast.ClassDef)
        for member in one.binding.body:
            if not isinstance(member, Function) or member.name in ("__init__", "load_weights"):
                continue
            below = methods.get(member.name)
            if below is None or f"super().{member.name}(" in ast.unparse(below.function):
                methods[member.name] = Method(one, member)
    for method in sorted(methods.values(), key=lambda method: method.function.name != "forward"):
        calls = list(_list_calls_in(definitions, method, attribute))
        if calls:
            yield from calls
            return


def _list_calls_in(definitions: Definitions, method: Method, attribute: str) -> Iterator[LoopCall]:
    layers = f"self.{attribute}"
    names = set()
    for node in ast.walk(method.function):
        if isinstance(node, ast.For) and _mentions(node.iter, layers):
            names |= {one.id for one in ast.walk(node.target) if isinstance(one, ast.Name)}
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Subscript) and _mentions(node.value, layers):
            names |= {one.id for target in node.targets for one in ast.walk(target) if isinstance(one, ast.Name)}
    results = {
        id(node.value): ast.unparse(node.targets[0])
        for node in ast.walk(method.function)
        if isinstance(node, ast.Assign)
    }
    for node in ast.walk(method.function):
        if not isinstance(node, ast.Call):
            continue
        is_name = isinstance(node.func, ast.Name) and node.func.id in names
        is_item = isinstance(node.func, ast.Subscript) and ast.unparse(node.func.value) == layers
        if is_name or is_item:
            yield _make_call(node, definitions.place(method.owner.module, node), results.get(id(node), ""))


def _mentions(expression: ast.expr, layers: str) -> bool:
    return any(ast.unparse(one) == layers for one in ast.walk(expression) if isinstance(one, ast.Attribute))


def _make_call(node: ast.Call, place: str, result: str) -> LoopCall:
    words = [ast.unparse(one) for one in node.args]
    named = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords if keyword.arg}
    stars = [f"**{ast.unparse(keyword.value)}" for keyword in node.keywords if not keyword.arg]
    text = ", ".join([*words, *(f"{name}={value}" for name, value in named.items()), *stars])
    has_stars = bool(stars) or any(isinstance(one, ast.Starred) for one in node.args)
    positional = tuple(word for word in words if not word.startswith("*"))
    return LoopCall(f"layer({text})", place, result.strip("()"), positional, tuple(named), has_stars)
