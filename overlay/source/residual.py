"""What a decoder layer's forward does with the residual that it is given, read from its text.

Many layers keep a local variable `residual` and hand it on, and the next layer does not look at it (Cohere, EXAONE 4,
StableLM): there the hidden states alone are the residual stream, and adding both would be a silent error.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from vllm_overlay.source.bindings import Function

NAME = "residual"


def carries_residual(forward: Function) -> bool:
    """Whether the forward takes a residual and reads it before it puts something else under that name."""
    arguments = forward.args
    if NAME not in [one.arg for one in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]:
        return False
    first = next((use for statement in forward.body for use in _list_uses(statement)), None)
    return first is not None and isinstance(first.ctx, ast.Load)


def list_returned(forward: Function) -> tuple[str, ...]:
    """The values of the longest tuple that the forward returns, as written; none where it returns no tuple."""
    tuples = [
        tuple(ast.unparse(one) for one in node.value.elts)
        for node in ast.walk(forward)
        if isinstance(node, ast.Return) and isinstance(node.value, ast.Tuple)
    ]
    return max(tuples, key=len, default=())


def _list_uses(node: ast.AST) -> Iterator[ast.Name]:
    """The uses of the name in the order in which they run: of an assignment, its value before its target."""
    if isinstance(node, ast.Name):
        if node.id == NAME:
            yield node
        return
    children = list(ast.iter_child_nodes(node))
    if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
        children.sort(key=lambda child: child is not node.value)
    for child in children:
        yield from _list_uses(child)
