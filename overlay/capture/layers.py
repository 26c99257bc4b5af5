"""The decoder layers of a built model, and where in their calls the residual stream goes in and comes out.

What a layer means by its arguments is read off its own forward: names, and what its `return` hands on. A layer that
takes `residual` carries the stream as two summands; one that does not carries it as one tensor, whatever else it
returns (StableLM returns a `residual` that nobody takes).
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from vllm_overlay.capture.limits import STREAM_NAMES, describe_first_layer, describe_output, find_stream
from vllm_overlay.errors import OverlayError

_RESIDUAL = "residual"
_TOWERS = ("vision", "visual", "audio", "image")
# ChatGLM's text model calls its own stack so.
_PERHAPS_TOWERS = ("encoder",)


class TapError(OverlayError):
    """The model has no layers that can be tapped as asked."""


@dataclass(frozen=True)
class StreamOutput:
    """Where the stream is in what a layer returns. `residual` is None where it is one tensor."""

    hidden: int
    residual: int | None


@dataclass(frozen=True)
class StreamInput:
    """The parameters of a layer's forward that take the stream, and their places among those by position."""

    hidden: str
    hidden_place: int
    residual: str | None
    residual_place: int


def find_decoder_layers(model: nn.Module, num_hidden_layers: int) -> list[nn.Module]:
    """The model's decoder layers in order. Errors: TapError naming what was found instead."""
    found = {
        name: list(module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList)
        and len(module) == num_hidden_layers
        and any(_is_layer(layer) for layer in module)
    }
    found = _leave_out(found, _TOWERS)
    found = _leave_out(found, _PERHAPS_TOWERS) or found
    outermost = {name: layers for name, layers in found.items() if not _has_parent(name, found)}
    if len(outermost) == 1:
        return next(iter(outermost.values()))
    raise TapError(
        f"expected one list of {num_hidden_layers} decoder layers in {type(model).__name__}, "
        f"found {', '.join(sorted(outermost)) or 'none'}"
    )


def read_input(layer: nn.Module) -> StreamInput:
    """How the layer receives the stream. Errors: TapError when its forward does not say."""
    parameters = inspect.signature(layer.forward).parameters
    refusal = describe_first_layer(type(layer).__name__, list(parameters))
    if refusal:
        raise TapError(refusal)
    names = list(parameters)
    hidden = find_stream(names)
    assert hidden is not None
    residual = _RESIDUAL if _RESIDUAL in parameters else None
    return StreamInput(hidden, names.index(hidden), residual, names.index(residual) if residual else -1)


def read_output(layer: nn.Module) -> StreamOutput:
    """Where the stream is in the tuple that the layer returns, if it returns one.

    Errors: TapError when a layer that carries a residual returns more than two values and does not call one so.
    """
    if _RESIDUAL not in inspect.signature(layer.forward).parameters:
        return StreamOutput(0, None)
    returned = _read_returned(layer)
    if len(returned) <= 2:
        return StreamOutput(0, 1)
    refusal = describe_output(type(layer).__name__, returned)
    if refusal:
        raise TapError(refusal)
    return StreamOutput(0, returned.index(_RESIDUAL))


def _read_returned(layer: nn.Module) -> tuple[str, ...]:
    """The names in the longest tuple that the layer's forward returns; empty where there is no tuple."""
    source = textwrap.dedent(inspect.getsource(inspect.unwrap(type(layer).forward)))
    tuples = [
        tuple(ast.unparse(one) for one in node.value.elts)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Return) and isinstance(node.value, ast.Tuple)
    ]
    return max(tuples, key=len, default=())


def bind(stream: StreamInput, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
    """The hidden states and the residual (or None) of a call of the layer, by position or by keyword."""
    hidden = args[stream.hidden_place] if stream.hidden_place < len(args) else kwargs[stream.hidden]
    if stream.residual is None:
        return hidden, None
    if stream.residual_place < len(args):
        return hidden, args[stream.residual_place]
    return hidden, kwargs.get(stream.residual)


def _leave_out(found: Mapping[str, list[nn.Module]], words: Sequence[str]) -> dict[str, list[nn.Module]]:
    return {name: layers for name, layers in found.items() if not any(word in name for word in words)}


def _is_layer(module: nn.Module) -> bool:
    """By its name, or by what it takes (Falcon-H1's are called FalconH1ParallelHybrid)."""
    if type(module).__name__.endswith(("Layer", "Block")):
        return True
    return STREAM_NAMES[0] in inspect.signature(module.forward).parameters


def _has_parent(name: str, others: Mapping[str, Any]) -> bool:
    return any(name.startswith(f"{other}.") for other in others)
