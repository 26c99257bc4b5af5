"""What a name of vLLM is, read from its files with `ast`: where it is defined, how it is called, who else binds it.

A name is written as in a patch: `vllm.v1.request:Request.__init__`, or `vllm.v1.request` for the module itself.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from vllm_overlay.source.bindings import (
    Binding,
    Function,
    Import,
    find_in_body,
    list_bindings,
    list_fields,
    list_members,
    name_bases,
    name_decorators,
    write_field,
)
from vllm_overlay.source.signatures import write_signature
from vllm_overlay.source.vllm_source import SourceError, VllmSource

Kind = Literal[
    "function",
    "async function",
    "property",
    "classmethod",
    "staticmethod",
    "class",
    "field",
    "value",
    "module",
    "absent",
]
# Classes are bound all over vLLM; patches replace what is in them.
COPIED: tuple[Kind, ...] = ("function", "async function", "value")


@dataclass(frozen=True)
class Definition:
    """What a name is in one release.

    `place` is `file:line`. `fields` are those in a class's body, or the field itself: `name` or `name=default`; a class
    that the module imports is looked at where it comes from. `imported_from` and `inherited_from` name the definition
    that was followed to; `bound_in` are the modules that have a binding of their own of a module-level function or
    value, by `from X import name`; `elsewhere` is where an absent name, or one much like it, is defined.
    """

    kind: Kind
    place: str = ""
    signature: str = ""
    bases: tuple[str, ...] = ()
    fields: tuple[str, ...] = ()
    imported_from: str = ""
    inherited_from: str = ""
    bound_in: tuple[str, ...] = ()
    elsewhere: tuple[str, ...] = ()

    @property
    def is_there(self) -> bool:
        """Whether the name stands where it was looked for. An inherited one does not: replacing it is another thing."""
        return self.kind != "absent" and not self.inherited_from


@dataclass(frozen=True)
class Found:
    """A binding and the module and path it was found under, after imports were followed."""

    module: str
    path: str
    binding: Binding

    @property
    def name(self) -> str:
        return f"{self.module}:{self.path}"


class Definitions:
    """The definitions of one release. Files are parsed when a name in them is asked for.

    With a platform, as in `current_platform.is_cuda()`, what a module binds on others is left out. Without one the
    first branch of an `if` counts.
    """

    def __init__(self, source: VllmSource, platform: str = "") -> None:
        self._source = source
        self._platform = platform
        self._bindings: dict[str, dict[str, Binding]] = {}
        self._parsed: dict[str, list[ast.stmt]] = {}

    def find(self, name: str) -> Definition:
        """What the name is; of kind `absent` if it is nothing. Errors: SourceError if a file cannot be parsed."""
        module, _, path = name.partition(":")
        if not path:
            file = self._find_file(module)
            return Definition("module", place=f"{file}:1") if file else Definition("absent")
        if self._find_file(f"{module}.{path}"):
            return self.find(f"{module}.{path}")
        first, _, rest = path.partition(".")
        owner = self.follow(module, first)
        if owner is None:
            near = difflib.get_close_matches(first, self._list_bindings(module), n=1, cutoff=0.7)
            return Definition("absent", elsewhere=self._search(first, rest) or tuple(f"{module}:{one}" for one in near))
        imported_from = owner.name if owner.module != module or owner.path != first else ""
        if not rest:
            return self._describe(owner, imported_from=imported_from)
        if not isinstance(owner.binding, ast.ClassDef) or "." in rest:
            return Definition("absent")
        return self._find_member(owner, owner.binding, rest, imported_from)

    def find_class(self, module: str, name: str) -> Found | None:
        """The class behind a module's name, wherever it is defined; None if it is none. Errors: SourceError."""
        found = self.follow(module, name)
        return found if found and isinstance(found.binding, ast.ClassDef) else None

    def list_lineage(self, found: Found) -> tuple[Found, ...]:
        """A class and its base classes inside vLLM, each once. Errors: SourceError."""
        assert isinstance(found.binding, ast.ClassDef)
        return tuple(dict.fromkeys([found, *self.list_ancestors(found, found.binding)]))

    def read_module(self, module: str) -> list[ast.stmt]:
        """The statements of a module; none if there is no such file. Errors: SourceError."""
        file = self._find_file(module)
        return self._parse(file) if file else []

    def place(self, module: str, node: ast.stmt | ast.expr) -> str:
        """Where a node of a module is: `file:line`."""
        return f"{self._find_file(module)}:{node.lineno}"

    def look_at(self, name: str) -> Definition:
        """What the name is, and for a function or value of a module, who else binds it. Errors: SourceError."""
        definition = self.find(name)
        if ":" not in name or "." in name.partition(":")[2] or definition.kind not in COPIED:
            return definition
        return dataclasses.replace(definition, bound_in=self.find_copies(name))

    def find_copies(self, name: str) -> tuple[str, ...]:
        """The other modules that bind this module-level name with `from X import name` as they are imported."""
        module, _, path = name.partition(":")
        original = self.follow(module, path)
        if original is None:
            return ()
        pattern = re.compile(rf"^\s*from\s[^#\n]*\simport\s[^#]*?\b{re.escape(path)}\b", re.MULTILINE)
        copies = []
        for file, text in self._source.files.items():
            other = _name_module(file)
            if other in (module, original.module) or path not in text or not pattern.search(text):
                continue
            bound = self._list_bindings(other).values()
            if any(isinstance(one, Import) and self.follow(one.module, one.name) == original for one in bound):
                copies.append(other)
        return tuple(sorted(copies))

    def _find_file(self, module: str) -> str | None:
        stem = module.replace(".", "/")
        return next((file for file in (f"{stem}.py", f"{stem}/__init__.py") if file in self._source.files), None)

    def _list_bindings(self, module: str) -> dict[str, Binding]:
        if module not in self._bindings:
            file = self._find_file(module)
            package = module if file and file.endswith("__init__.py") else module.rpartition(".")[0]
            # Modules may star-import each other: what this one binds is looked up while it is being made.
            bindings: dict[str, Binding] = {}
            self._bindings[module] = bindings
            for name, binding in list_bindings(self._parse(file), package, self._platform) if file else ():
                if isinstance(binding, Import) and binding.name == "*":
                    public = [one for one in self._list_bindings(binding.module) if not one.startswith("_")]
                    bindings |= {one: Import(binding.module, one) for one in public}
                else:
                    bindings[name] = binding
        return self._bindings[module]

    def _parse(self, file: str) -> list[ast.stmt]:
        if file not in self._parsed:
            try:
                self._parsed[file] = ast.parse(self._source.files[file]).body
            except SyntaxError as error:
                raise SourceError(f"{file}:{error.lineno} cannot be parsed by this Python: {error.msg}") from error
        return self._parsed[file]

    def follow(self, module: str, name: str) -> Found | None:
        """The definition behind a module's name: imports and aliases are followed to where it comes from."""
        seen: set[tuple[str, str]] = set()
        while (module, name) not in seen:
            seen.add((module, name))
            bindings = self._list_bindings(module)
            binding = bindings.get(name)
            if binding is None:
                return None
            alias = binding.value if isinstance(binding, ast.Assign) else None
            if isinstance(alias, ast.Name) and alias.id in bindings:
                name = alias.id
            elif isinstance(binding, Import) and self._find_file(f"{binding.module}.{binding.name}"):
                return Found(module, name, Import(f"{binding.module}.{binding.name}", ""))
            elif isinstance(binding, Import) and binding.name and self._find_file(binding.module):
                module, name = binding.module, binding.name
            else:
                return Found(module, name, binding)
        return None

    def _find_member(self, owner: Found, body: ast.ClassDef, name: str, imported_from: str) -> Definition:
        followed = f"{imported_from}.{name}" if imported_from else ""
        member = find_in_body(body, name)
        if member is not None:
            return self._describe(Found(owner.module, f"{owner.path}.{name}", member), imported_from=followed)
        for base in self.list_ancestors(owner, body):
            assert isinstance(base.binding, ast.ClassDef)
            member = find_in_body(base.binding, name)
            if member is not None:
                found = Found(base.module, f"{base.path}.{name}", member)
                return self._describe(found, imported_from=followed, inherited_from=found.name)
        near = difflib.get_close_matches(name, list_members(body), n=1, cutoff=0.7)
        return Definition("absent", elsewhere=tuple(f"{owner.name}.{one}" for one in near))

    def list_ancestors(self, owner: Found, body: ast.ClassDef) -> Iterator[Found]:
        """The base classes inside vLLM, depth first."""
        for name in name_bases(body):
            first, _, rest = name.partition(".")
            base = self.follow(owner.module, first)
            if base and rest and isinstance(base.binding, Import):
                base = self.follow(base.binding.module, rest)
            if base and isinstance(base.binding, ast.ClassDef):
                yield base
                yield from self.list_ancestors(base, base.binding)

    def _search(self, name: str, rest: str) -> tuple[str, ...]:
        """Where the release has a function or class of this name at the top of a module, and in the class `rest`."""
        found = [self.follow(module, name) for module in self._modules_by_name.get(name, ())]
        if not rest:
            return tuple(one.name for one in found if one)
        classes = [(one.name, one.binding) for one in found if one and isinstance(one.binding, ast.ClassDef)]
        return tuple(f"{class_name}.{rest}" for class_name, body in classes if find_in_body(body, rest))

    @functools.cached_property
    def _modules_by_name(self) -> dict[str, list[str]]:
        """The modules that define a function or class, by its name; read off the text, sooner done than parsing."""
        pattern = re.compile(r"^(?:async )?(?:def|class) (\w+)", re.MULTILINE)
        modules: dict[str, list[str]] = {}
        for file, text in self._source.files.items():
            for name in dict.fromkeys(pattern.findall(text)):
                modules.setdefault(name, []).append(_name_module(file))
        return modules

    def _describe(self, found: Found, imported_from: str = "", inherited_from: str = "") -> Definition:
        binding = found.binding
        if isinstance(binding, Import):
            return Definition("value", imported_from=f"{binding.module}:{binding.name}".rstrip(":"))
        place = f"{self._find_file(found.module)}:{binding.lineno}"
        if isinstance(binding, ast.ClassDef):
            if imported_from:
                return Definition("class", place, imported_from=imported_from)
            return Definition("class", place, "", name_bases(binding), tuple(list_fields(binding)))
        if isinstance(binding, Function):
            signature = write_signature(binding.args)
            return Definition(_kind_of(binding), place, signature, (), (), imported_from, inherited_from)
        name = found.path.rpartition(".")[2]
        kind: Kind = "field" if name != found.path else "value"
        fields = (write_field(name, binding),) if kind == "field" else ()
        return Definition(kind, place, "", (), fields, imported_from, inherited_from)


def _kind_of(function: Function) -> Kind:
    names = name_decorators(function)
    if names & {"property", "cached_property"}:
        return "property"
    if "classmethod" in names:
        return "classmethod"
    if "staticmethod" in names:
        return "staticmethod"
    return "async function" if isinstance(function, ast.AsyncFunctionDef) else "function"


def _name_module(file: str) -> str:
    return file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
