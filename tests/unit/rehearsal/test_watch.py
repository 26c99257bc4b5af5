"""The watch beside the taps: what it compares, and that it leaves a wrong call to the layer."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from vllm_overlay.capture.taps import Taps, install_taps
from vllm_overlay.rehearsal.watch import Watch, digest


class ToyLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))

    def forward(self, positions: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states * self.weight


class SummandsLayer(ToyLayer):
    def forward(  # type: ignore[override]
        self, hidden_states: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        residual = hidden_states if residual is None else hidden_states + residual
        return residual * self.weight, residual


class SummandsNorm(nn.Module):
    def forward(self, hidden_states: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return hidden_states + residual


class SummandsModel(nn.Module):
    """Hands its stream on as two summands, as most of vLLM's models do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([SummandsLayer(), SummandsLayer()])
        self.norm = SummandsNorm()

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        residual = None
        for layer in self.layers:
            hidden_states, residual = layer(hidden_states, residual)
        output: torch.Tensor = self.norm(hidden_states, residual)
        return output


class ToyModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([ToyLayer(), ToyLayer()])
        self.norm = nn.Identity()

    def forward(self, hidden_states: torch.Tensor, name: str = "positions") -> torch.Tensor:
        for layer in self.layers:
            hidden_states = layer(**{name: torch.arange(3)}, hidden_states=hidden_states)
        return self.norm(hidden_states)


def watch(
    model: ToyModel | SummandsModel, layer_ids: tuple[int, ...], said: tuple[int, ...] | None = None
) -> tuple[Watch, Taps]:
    """Taps of these ids, and a watch that is told they are those of `said`."""
    taps = install_taps(list(model.layers), layer_ids, max_tokens=8, hidden_size=4, dtype=torch.float32)
    return watch_taps(model, Taps(said or layer_ids, taps.buffer, taps.handles)), taps


def watch_taps(model: ToyModel | SummandsModel, taps: Taps) -> Watch:
    text = SimpleNamespace(num_hidden_layers=2, model_type="toy")
    config = SimpleNamespace(get_hidden_size=lambda: 4, hf_text_config=text)
    worker = SimpleNamespace(get_model=lambda: model, vllm_config=SimpleNamespace(model_config=config))
    return Watch(worker, taps)


@torch.no_grad()
def test_each_layer_receives_what_was_captured() -> None:
    model = ToyModel()
    watched, taps = watch(model, (2, 0, 1))
    model(torch.randn(3, 4))
    assert watched.faults == []
    assert watched.rows == {digest(row) for row in taps.buffer[:3]}
    assert len(watched.rows) == 3


@torch.no_grad()
def test_states_in_each_others_columns_are_seen() -> None:
    model = ToyModel()
    watched, _ = watch(model, (0, 1, 2), said=(1, 0, 2))
    model(torch.randn(3, 4))
    assert watched.faults == ["layer id 0 is not what layer 1 receives", "layer id 1 is not what layer 2 receives"]


@torch.no_grad()
def test_a_call_that_does_not_fit_is_the_layers_to_refuse() -> None:
    model = ToyModel()
    watch(model, (0, 1, 2))
    with pytest.raises(TypeError, match="got an unexpected keyword argument 'position_ids'"):
        model(torch.randn(3, 4), "position_ids")


@torch.no_grad()
def test_two_summands_are_captured_as_their_sum() -> None:
    model = SummandsModel()
    watched, _ = watch(model, (0, 1, 2))
    model(torch.randn(3, 4))
    assert watched.faults == []


@torch.no_grad()
def test_a_capture_that_forgets_the_residual_is_seen() -> None:
    model = SummandsModel()
    buffer = torch.zeros(8, 3, 4)

    def forget(column: int, hidden: torch.Tensor) -> None:
        buffer[:3, column] = hidden

    for index, layer in enumerate(model.layers):
        layer.register_forward_pre_hook(lambda _, args, index=index: forget(index, args[0]))
    model.layers[-1].register_forward_hook(lambda _, args, output: forget(2, output[0]))
    watched = watch_taps(model, Taps((0, 1, 2), buffer, ()))
    model(torch.randn(3, 4))
    assert watched.faults == [
        "layer id 1 is not what layer 2 receives",
        "layer id 2 is not what SummandsNorm receives behind the last layer",
    ]
