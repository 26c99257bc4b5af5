"""Taps: an operator in the chosen decoder layers that copies the residual stream into a buffer.

The operator is registered with torch, so torch.compile keeps it and CUDA graphs replay it, writing to the same
address every step. It mutates no argument (the buffer is found through this module) and returns a fresh copy of
`hidden` that the layer hands on: that way it is neither dropped as dead code nor makes functionalization clone the
buffer.

Layer ids (as vLLM >= 0.18.1 and speculators 0.9): id 0 is the embedding output, id k the residual stream after k
decoder layers, id N the stream before the final norm.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from vllm_overlay.capture.limits import CAPTURED_OUTPUT, describe_first_layer
from vllm_overlay.errors import OverlayError

# Part of the compile-cache key: raise it when what the taps compile to changes.
TAP_FORMAT = 1

_BUFFERS: dict[str, torch.Tensor] = {}
_CURRENT = "current"

_LIBRARY: Any = torch.library.Library("vllm_overlay", "DEF")
_LIBRARY.define("tap(Tensor hidden, Tensor? residual, int column) -> Tensor")


class TapError(OverlayError):
    """The model has no layers that can be tapped as asked."""


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
        self.buffer[..., 0].fill_(float("nan"))

    def remove(self) -> None:
        """Take the taps out of the model."""
        for handle in self.handles:
            handle.remove()


def find_decoder_layers(model: nn.Module, num_hidden_layers: int) -> list[nn.Module]:
    """The model's decoder layers in order. Errors: TapError naming what was found instead."""
    found = {
        name: list(module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList)
        and len(module) == num_hidden_layers
        and not _is_encoder(name)
        and type(module[0]).__name__.endswith(("Layer", "Block"))
    }
    outermost = {name: layers for name, layers in found.items() if not _has_parent(name, found)}
    if len(outermost) == 1:
        return next(iter(outermost.values()))
    raise TapError(
        f"expected one list of {num_hidden_layers} decoder layers in {type(model).__name__}, "
        f"found {', '.join(sorted(outermost)) or 'none'}"
    )


def install_taps(
    layers: Sequence[nn.Module], layer_ids: Sequence[int], *, max_tokens: int, hidden_size: int, dtype: torch.dtype
) -> Taps:
    """Tap the layers so that every forward fills the columns of the buffer, one per id, in the order given.

    Errors: TapError when the first layer's forward has no `hidden_states` parameter (needed for id 0), or when a layer
    is of another pipeline stage.
    """
    _refuse_placeholders(layers, layer_ids)
    device = next(layers[max(0, layer_ids[0] - 1)].parameters()).device
    buffer = torch.zeros(max_tokens, len(layer_ids), hidden_size, dtype=dtype, device=device)
    _BUFFERS[_CURRENT] = buffer
    handles = []
    for column, layer_id in enumerate(layer_ids):
        if layer_id == 0:
            handles.append(_tap_input(layers[0], column))
        else:
            handles.append(layers[layer_id - 1].register_forward_hook(_OutputTap(column)))
    return Taps(tuple(layer_ids), buffer, tuple(handles))


def _refuse_placeholders(layers: Sequence[nn.Module], layer_ids: Sequence[int]) -> None:
    """A pipeline stage's model has modules without parameters in the places of the other stages' layers."""
    elsewhere = [k for k in layer_ids if next(layers[max(0, k - 1)].parameters(), None) is None]
    if elsewhere:
        raise TapError(f"layers of ids {elsewhere} are not on this pipeline stage: their places have no parameters")


class _OutputTap:
    """A forward hook: taps what a layer returns, `hidden` or (`hidden`, `residual`)."""

    def __init__(self, column: int) -> None:
        self.column = column

    def __call__(self, layer: nn.Module, args: Any, output: Any) -> Any:
        if isinstance(output, torch.Tensor):
            return torch.ops.vllm_overlay.tap(output, None, self.column)
        if isinstance(output, tuple) and len(output) == 2:
            hidden, residual = output
            return torch.ops.vllm_overlay.tap(hidden, residual, self.column), residual
        what = f"a tuple of {len(output)}" if isinstance(output, tuple) else type(output).__name__
        raise TapError(f"{type(layer).__name__} returns {what}; expected {CAPTURED_OUTPUT}")


def _tap_input(layer: nn.Module, column: int) -> Any:
    """Tap what the first layer receives. Its arguments are bound by the layer's own signature."""
    signature = inspect.signature(layer.forward)
    refusal = describe_first_layer(type(layer).__name__, list(signature.parameters))
    if refusal:
        raise TapError(refusal)
    names = list(signature.parameters)
    index = names.index("hidden_states")
    residual_index = names.index("residual") if "residual" in names else -1

    def tap_arguments(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        residual = kwargs.get("residual")
        if 0 <= residual_index < len(args):
            residual = args[residual_index]
        if index < len(args):
            tapped = torch.ops.vllm_overlay.tap(args[index], residual, column)
            return (*args[:index], tapped, *args[index + 1 :]), kwargs
        tapped = torch.ops.vllm_overlay.tap(kwargs["hidden_states"], residual, column)
        return args, {**kwargs, "hidden_states": tapped}

    return layer.register_forward_pre_hook(tap_arguments, with_kwargs=True)


def _is_encoder(name: str) -> bool:
    """Vision and audio towers have layers of their own, sometimes as many as the text model."""
    return any(word in name for word in ("vision", "visual", "audio", "image", "encoder"))


def _has_parent(name: str, others: dict[str, Any]) -> bool:
    return any(name.startswith(f"{other}.") for other in others)
