"""Taps: an operator in the chosen decoder layers that copies the residual stream into a buffer.

The operator is registered with torch, so torch.compile keeps it and CUDA graphs replay it, writing to the same
address every step. It mutates no argument (the buffer is found through this module) and returns a fresh copy of
`hidden` that the layer hands on: that way it is neither dropped as dead code nor makes functionalization clone the
buffer.

Layer ids (as vLLM >= 0.18.1 and speculators 0.9): id 0 is the embedding output, id k the residual stream after k
decoder layers, id N the stream before the final norm.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from vllm_overlay.capture.layers import TapError, bind, count_layers, find_decoder_layers, read_input, read_output
from vllm_overlay.capture.limits import CAPTURED_OUTPUT, describe_stream

__all__ = ["TapError", "Taps", "count_layers", "find_decoder_layers", "install_taps"]

# Part of the compile-cache key: raise it when what the taps compile to changes.
TAP_FORMAT = 1

_BUFFERS: dict[str, torch.Tensor] = {}
_CURRENT = "current"

_LIBRARY: Any = torch.library.Library("vllm_overlay", "DEF")
_LIBRARY.define("tap(Tensor hidden, Tensor? residual, int column) -> Tensor")


def _tap(hidden: torch.Tensor, residual: torch.Tensor | None, column: int) -> torch.Tensor:
    rows = hidden.reshape(-1, hidden.shape[-1])  # [tokens, hidden]
    place = _BUFFERS[_CURRENT][: rows.shape[0], column]  # [tokens, hidden], strided
    if residual is None:
        place.copy_(rows)
    else:
        torch.add(rows, residual.reshape(rows.shape), out=place)
    return hidden.clone()


def _tap_fake(hidden: torch.Tensor, residual: torch.Tensor | None, column: int) -> torch.Tensor:
    return torch.empty_like(hidden)


_LIBRARY.impl("tap", _tap, "CompositeExplicitAutograd")
torch.library.register_fake("vllm_overlay::tap", _tap_fake, lib=_LIBRARY)


@dataclass(frozen=True)
class Taps:
    """The taps of one model. `buffer` is `[max tokens a step, layers, hidden]` in the model's dtype, on its device."""

    layer_ids: tuple[int, ...]
    buffer: torch.Tensor
    handles: tuple[Any, ...]

    def poison(self) -> None:
        """Make every row not finite, so that a tap that does not fire in the next step is seen for what it is.

        One element of a row is enough, and cheap.
        """
        self._first_elements.fill_(math.nan)

    @functools.cached_property
    def _first_elements(self) -> torch.Tensor:
        """`[max tokens a step, layers]`. Kept: on a GPU making the view costs the step as much as filling it."""
        return self.buffer[..., 0]

    def remove(self) -> None:
        """Take the taps out of the model."""
        for handle in self.handles:
            handle.remove()


def install_taps(
    layers: Sequence[nn.Module], layer_ids: Sequence[int], *, max_tokens: int, hidden_size: int, dtype: torch.dtype
) -> Taps:
    """Tap the layers so that every forward fills the columns of the buffer, one per id, in the order given.

    Errors: TapError when a layer's forward does not say where the stream is, or a layer is of another pipeline stage;
    and from a tapped layer, in the model's first step, when what it hands on is not one stream of this width.
    """
    _refuse_placeholders(layers, layer_ids)
    device = next(layers[max(0, layer_ids[0] - 1)].parameters()).device
    buffer = torch.zeros(max_tokens, len(layer_ids), hidden_size, dtype=dtype, device=device)
    _BUFFERS[_CURRENT] = buffer
    handles = []
    for column, layer_id in enumerate(layer_ids):
        if layer_id == 0:
            handles.append(_tap_input(layers[0], column, hidden_size))
        else:
            layer = layers[layer_id - 1]
            handles.append(layer.register_forward_hook(_OutputTap(layer, column, hidden_size)))
    return Taps(tuple(layer_ids), buffer, tuple(handles))


def _refuse_placeholders(layers: Sequence[nn.Module], layer_ids: Sequence[int]) -> None:
    """A pipeline stage's model has modules without parameters in the places of the other stages' layers."""
    elsewhere = [k for k in layer_ids if next(layers[max(0, k - 1)].parameters(), None) is None]
    if elsewhere:
        raise TapError(f"layers of ids {elsewhere} are not on this pipeline stage: their places have no parameters")


class _OutputTap:
    """A forward hook: taps what a layer returns."""

    def __init__(self, layer: nn.Module, column: int, hidden_size: int) -> None:
        self.column = column
        self.hidden_size = hidden_size
        self.stream = read_output(layer)

    def __call__(self, layer: nn.Module, args: Any, output: Any) -> Any:
        if isinstance(output, torch.Tensor):
            _refuse_streams(layer, output, None, self.hidden_size)
            return torch.ops.vllm_overlay.tap(output, None, self.column)
        if not isinstance(output, tuple):
            raise TapError(f"{type(layer).__name__} returns {type(output).__name__}; expected {CAPTURED_OUTPUT}")
        if len(output) > self.stream.count:
            raise TapError(f"{type(layer).__name__} returns a tuple of {len(output)}; expected {CAPTURED_OUTPUT}")
        hidden, place = output[0], self.stream.residual
        residual = output[place] if place is not None and place < len(output) else None
        _refuse_streams(layer, hidden, residual, self.hidden_size)
        tapped = torch.ops.vllm_overlay.tap(hidden, residual, self.column)
        return (tapped, *output[1:])


def _tap_input(layer: nn.Module, column: int, hidden_size: int) -> Any:
    """Tap what the first layer receives. Its arguments are bound by the layer's own signature."""
    stream = read_input(layer)

    def tap_arguments(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        hidden, residual = bind(stream, args, kwargs)
        _refuse_streams(module, hidden, residual, hidden_size)
        tapped = torch.ops.vllm_overlay.tap(hidden, residual, column)
        place = stream.hidden_place
        if place < len(args):
            return (*args[:place], tapped, *args[place + 1 :]), kwargs
        return args, {**kwargs, stream.hidden: tapped}

    return layer.register_forward_pre_hook(tap_arguments, with_kwargs=True)


def _refuse_streams(layer: nn.Module, hidden: Any, residual: Any, hidden_size: int) -> None:
    """Errors: TapError when what would be tapped is not one stream of width `hidden_size`."""
    for what, value in (("hidden states", hidden), ("a residual", residual)):
        if value is None and what == "a residual":
            continue
        refusal = describe_stream(type(layer).__name__, what, getattr(value, "shape", None), hidden_size)
        if refusal:
            raise TapError(refusal)
