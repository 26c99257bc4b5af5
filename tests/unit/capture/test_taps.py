"""Taps on small models: layer ids, both forms of a decoder layer, compiled and eager."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from vllm_overlay.capture.taps import TapError, find_decoder_layers, install_taps
from vllm_overlay.layer_ids import LayerIdsError, resolve_layer_ids
from vllm_overlay.settings import SettingsError

HIDDEN = 8


class PairLayer(nn.Module):
    """As llama: (positions, hidden, residual) -> (hidden, residual)."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN, HIDDEN)

    def forward(
        self, positions: torch.Tensor, hidden_states: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        residual = hidden_states if residual is None else hidden_states + residual
        return self.linear(residual), residual


class SingleBlock(nn.Module):
    """As gpt2: hidden -> hidden; overwrites one output buffer on every call."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.linear(hidden_states)


class Model(nn.Module):
    def __init__(self, kind: type[nn.Module], layers: int = 4) -> None:
        super().__init__()
        self.kind = kind
        self.layers = nn.ModuleList([kind() for _ in range(layers)])

    def forward(self, hidden: torch.Tensor, seen: list[torch.Tensor] | None = None) -> torch.Tensor:
        positions, residual = torch.arange(len(hidden)), None
        for layer in self.layers:
            if seen is not None:
                seen.append(hidden if residual is None else hidden + residual)
            if self.kind is PairLayer:
                hidden, residual = layer(positions, hidden, residual)
            else:
                hidden = layer(hidden)
        stream = hidden if residual is None else hidden + residual
        if seen is not None:
            seen.append(stream)
        return stream


def tap(model: Model, ids: tuple[int, ...]) -> Any:
    return install_taps(list(model.layers), ids, max_tokens=16, hidden_size=HIDDEN, dtype=torch.float32)


@pytest.mark.parametrize("kind", [PairLayer, SingleBlock])
@pytest.mark.parametrize("compiled", [False, True])
@torch.no_grad()
def test_every_id_is_the_residual_stream_after_that_many_layers(kind: type[nn.Module], compiled: bool) -> None:
    torch.manual_seed(0)
    model = Model(kind)
    hidden = torch.randn(5, HIDDEN)
    states: list[torch.Tensor] = []
    plain = model(hidden, states)
    taps = tap(model, (4, 0, 2))
    # aot_eager traces as inductor does (functionalised, dead code dropped) and needs no C++ compiler.
    run = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
    assert torch.equal(run(hidden), plain)
    assert torch.equal(taps.buffer[:5], torch.stack([states[4], states[0], states[2]], dim=1))
    assert not taps.buffer[5:].any()


@torch.no_grad()
def test_a_captured_row_keeps_its_values_when_the_layer_reuses_its_output() -> None:
    """CASES 7: a layer that overwrites its output buffer in place on the next call."""

    class Reusing(SingleBlock):
        out = torch.zeros(3, HIDDEN)

        def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
            self.out.copy_(hidden_states + 1)
            return self.out

    model = Model(Reusing)
    taps = tap(model, (1, 4))
    model(torch.zeros(3, HIDDEN))
    assert taps.buffer[:3, 0].eq(1).all()
    assert taps.buffer[:3, 1].eq(4).all()


@torch.no_grad()
def test_a_tap_that_does_not_fire_leaves_the_poison() -> None:
    model = Model(PairLayer)
    taps = tap(model, (2,))
    taps.poison()
    assert not torch.isfinite(taps.buffer).all(dim=-1).any()
    model(torch.randn(2, HIDDEN))
    assert torch.isfinite(taps.buffer[:2]).all()
    taps.remove()
    taps.poison()
    model(torch.randn(2, HIDDEN))
    assert not torch.isfinite(taps.buffer).all(dim=-1).any()


def test_default_ids_and_their_order() -> None:
    assert resolve_layer_ids("eagle3", 30) == (2, 15, 27, 30)
    assert resolve_layer_ids("all", 3) == (0, 1, 2, 3)
    assert resolve_layer_ids("30,2,0", 30) == (30, 2, 0)


def test_ids_that_do_not_exist_are_named() -> None:
    """CASES 13: id 7 of a model of six layers; and a model too shallow for the default (CASES 15)."""
    with pytest.raises(LayerIdsError, match=r"layer ids \[7\] do not exist: this model has ids 0 to 6"):
        resolve_layer_ids("6,7", 6)
    with pytest.raises(LayerIdsError, match="for this model's N=6 are 2, 3, 3, 6: too shallow; name the layers"):
        resolve_layer_ids("eagle3", 6)
    with pytest.raises(SettingsError, match="neither 'eagle3', 'all'"):
        resolve_layer_ids("top", 6)


def test_layers_are_found_beside_a_vision_tower_of_the_same_depth() -> None:
    whole = nn.Module()
    whole.vision_tower = Model(SingleBlock)
    whole.language_model = Model(PairLayer)
    assert find_decoder_layers(whole, 4) == list(whole.language_model.layers)


def test_a_model_without_the_expected_layers_is_refused() -> None:
    with pytest.raises(TapError, match="expected one list of 5 decoder layers in Model, found none"):
        find_decoder_layers(Model(PairLayer), 5)
    two = nn.Module()
    two.a, two.b = Model(PairLayer), Model(PairLayer)
    with pytest.raises(TapError, match=r"found a\.layers, b\.layers"):
        find_decoder_layers(two, 4)
