"""The decoder layers of a built model, and where in their calls the residual stream goes in and comes out.

What a layer means by its arguments is read off its own forward, its signature and its text. A layer that reads the
`residual` that it is given carries the stream as two summands; one that does not carries it as one tensor, whatever
else it returns.
"""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from vllm_overlay.capture.limits import (
    STREAM_NAMES,
    describe_first_layer,
    describe_output,
    describe_streams,
    find_stream,
)
from vllm_overlay.errors import OverlayError
from vllm_overlay.source.bindings import Function
from vllm_overlay.source.residual import NAME, carries_residual, list_returned

_TOWERS = ("vision", "visual", "audio", "image")
# ChatGLM's text model calls its own stack so.
_PERHAPS_TOWERS = ("encoder",)


class TapError(OverlayError):
    """The model has no layers that can be tapped as asked."""


@dataclass(frozen=True)
class StreamOutput:
    """Where the stream is in a tuple that a layer returns: the first value, and `residual`, or None if it is whole.

    `count` is how many values there are at most.
    """

    residual: int | None
    count: int


@dataclass(frozen=True)
class StreamInput:
    """The parameters of a layer's forward that take the stream, and their places among those by position."""

    hidden: str
    hidden_place: int
    residual: str | None
    residual_place: int


def count_layers(config: Any) -> int:
    """Decoder layers of a text model's configuration, as transformers has it.

    It counts LongCat's attention, which there is twice in a layer.
    """
    return int(config.num_layers if config.model_type.startswith("longcat") else config.num_hidden_layers)


def find_decoder_layers(model: nn.Module, num_hidden_layers: int) -> list[nn.Module]:
    """The model's decoder layers in order.

    Errors: TapError naming what was found instead, or what the model's configuration says against it.
    """
    refusal = describe_streams(_read_text_config(model))
    if refusal:
        raise TapError(refusal)
    found = {
        name: list(module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList)
        and len(module) == num_hidden_layers
        and any(_is_layer(layer) for layer in module)
    }
    found = _leave_out(found, _TOWERS)
    found = _leave_out(found, _PERHAPS_TOWERS) or found
    # Gemma 3n's model holds its layers once more in a part of it.
    once = {tuple(map(id, layers)): name for name, layers in reversed(found.items())}
    found = {name: layers for name, layers in found.items() if name in once.values()}
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
    residual = NAME if carries_residual(_read_forward(layer)) else None
    return StreamInput(hidden, names.index(hidden), residual, names.index(residual) if residual else -1)


def read_output(layer: nn.Module) -> StreamOutput:
    """Where the stream is in the tuple that the layer returns, if it returns one.

    Errors: TapError when a layer that carries a residual returns more than two values and does not call one so, or its
    text is not there to be read.
    """
    forward = _read_forward(layer)
    if not carries_residual(forward):
        return StreamOutput(None, sys.maxsize)
    returned = list_returned(forward)
    refusal = describe_output(type(layer).__name__, returned)
    if refusal:
        raise TapError(refusal)
    return StreamOutput(returned.index(NAME) if len(returned) > 2 else 1, max(2, len(returned)))


def _read_forward(layer: nn.Module) -> Function:
    """The layer's forward as text, whatever wraps it."""
    function = inspect.unwrap(type(layer).forward)
    try:
        source = textwrap.dedent(inspect.getsource(function))
    except OSError as error:
        raise TapError(f"the text of {type(layer).__name__}.forward cannot be read: {error}") from error
    node = ast.parse(source).body[0]
    if not isinstance(node, Function):
        raise TapError(f"{type(layer).__name__}.forward is no function that is written out")
    return node


def bind(stream: StreamInput, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
    """The hidden states and the residual (or None) of a call of the layer, by position or by keyword."""
    hidden = args[stream.hidden_place] if stream.hidden_place < len(args) else kwargs[stream.hidden]
    if stream.residual is None:
        return hidden, None
    if stream.residual_place < len(args):
        return hidden, args[stream.residual_place]
    return hidden, kwargs.get(stream.residual)


def _read_text_config(model: nn.Module) -> Mapping[str, Any]:
    """What the model was built from, of its text; empty where it keeps no configuration."""
    config = getattr(model, "config", None)
    if config is None or not hasattr(config, "get_text_config"):
        return {}
    fields: Mapping[str, Any] = config.get_text_config().to_dict()
    return fields


def _leave_out(found: Mapping[str, list[nn.Module]], words: Sequence[str]) -> dict[str, list[nn.Module]]:
    return {name: layers for name, layers in found.items() if not any(word in name for word in words)}


def _is_layer(module: nn.Module) -> bool:
    """By its name, or by what it takes (Falcon-H1's are called FalconH1ParallelHybrid)."""
    if type(module).__name__.endswith(("Layer", "Block")):
        return True
    return STREAM_NAMES[0] in inspect.signature(module.forward).parameters


def _has_parent(name: str, others: Mapping[str, Any]) -> bool:
    return any(name.startswith(f"{other}.") for other in others)
