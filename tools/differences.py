"""What changed between two looks of a name, in words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from vllm_overlay.source.definitions import Definition
from vllm_overlay.source.signatures import Parameter, list_parameters, write_with_default


def describe_changes(before: Definition, now: Definition) -> list[str]:
    """One line per change; none if nothing that a caller or a patch could notice did."""
    if "absent" in (before.kind, now.kind):
        return list(_describe_presence(before, now))
    lines = []
    if before.kind != now.kind:
        lines.append(f"was a {before.kind}, is a {now.kind}")
    lines += _describe_origin(before, now)
    if before.signature and now.signature:
        lines += _describe_parameters(list_parameters(before.signature), list_parameters(now.signature))
    if before.bases != now.bases:
        lines.append(f"bases: {', '.join(before.bases) or 'none'} -> {', '.join(now.bases) or 'none'}")
    lines += _describe_fields(before.fields, now.fields)
    lines += [f"{module} binds it too, by a from-import" for module in now.bound_in if module not in before.bound_in]
    lines += [f"{module} no longer binds it" for module in before.bound_in if module not in now.bound_in]
    return lines


def _describe_presence(before: Definition, now: Definition) -> Iterator[str]:
    if before.kind == now.kind:
        return
    if now.kind == "absent":
        places = [place for place in now.elsewhere if place not in before.elsewhere]
        yield f"gone; now at {' or '.join(places)}" if places else "gone"
    else:
        inherited = f", inherited from {now.inherited_from}" if now.inherited_from else ""
        yield f"new: {now.signature or f'a {now.kind}'}{inherited}"


def _describe_origin(before: Definition, now: Definition) -> Iterator[str]:
    if before.imported_from != now.imported_from:
        yield f"now imported from {now.imported_from}" if now.imported_from else "now defined here, not imported"
    if before.inherited_from == now.inherited_from:
        return
    if now.inherited_from:
        yield f"now inherited from {now.inherited_from}"
    else:
        yield f"now defined in the class itself, before inherited from {before.inherited_from}"


def _describe_parameters(before: Sequence[Parameter], now: Sequence[Parameter]) -> Iterator[str]:
    old, new = {one.name: one for one in before}, {one.name: one for one in now}
    for index, one in enumerate(before):
        if one.name in new:
            yield from _describe_parameter(one, new[one.name])
        elif index < len(now) and now[index].name not in old and now[index].kind == one.kind:
            yield f"parameter {one.name!r} became {now[index].name!r}"
        else:
            yield f"parameter {one.name!r} removed"
    for index, one in enumerate(now):
        replaced = index < len(before) and before[index].name not in new and before[index].kind == one.kind
        if one.name not in old and not replaced:
            yield f"{_describe_new(one)}{_describe_position(one, index, now, old)}"
    common_before = [one.name for one in before if one.name in new]
    common_now = [one.name for one in now if one.name in old]
    if common_before != common_now:
        yield f"parameters reordered: {', '.join(common_before)} -> {', '.join(common_now)}"


def _describe_new(one: Parameter) -> str:
    stars = {"args": "*", "kwargs": "**"}.get(one.kind, "")
    kind = "required " if one.is_required else "optional " if not stars else ""
    return f"{kind}parameter {stars}{write_with_default(one.name, one.default)!r} added"


def _describe_position(
    one: Parameter, index: int, now: Sequence[Parameter], old: Sequence[str] | dict[str, Parameter]
) -> str:
    if one.kind == "keyword only":
        return ", keyword only"
    after = [later for later in now[index + 1 :] if later.kind == "positional" and later.name in old]
    return f", before {after[0].name!r}: calls by position break" if after and one.kind == "positional" else ""


def _describe_parameter(before: Parameter, now: Parameter) -> Iterator[str]:
    if before.kind != now.kind:
        yield f"parameter {now.name!r} is {now.kind}, was {before.kind}"
    if before.is_required != now.is_required:
        yield f"parameter {now.name!r} is now {'required' if now.is_required else f'optional, {now.default}'}"
    elif before.default != now.default:
        yield f"parameter {now.name!r} defaults to {now.default}, was {before.default}"


def _describe_fields(before: Sequence[str], now: Sequence[str]) -> Iterator[str]:
    old, new = _split(before), _split(now)
    for name in old:
        if name not in new:
            yield f"field {name!r} removed"
        elif (old[name] is None) != (new[name] is None):
            yield f"field {name!r} is now {'required' if new[name] is None else f'optional, {new[name]}'}"
        elif old[name] != new[name]:
            yield f"field {name!r} defaults to {new[name]}, was {old[name]}"
    for name, default in new.items():
        if name not in old:
            yield f"{'required' if default is None else 'optional'} field {write_with_default(name, default)!r} added"


def _split(fields: Sequence[str]) -> dict[str, str | None]:
    """Names and defaults."""
    parts = (field.partition("=") for field in fields)
    return {name: default if equals else None for name, equals, default in parts}
