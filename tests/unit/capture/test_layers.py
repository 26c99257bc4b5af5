"""Which layers are the decoder's, and where the residual stream is in their calls, on small modules of many kinds."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from vllm_overlay.capture.layers import (
    StreamInput,
    TapError,
    count_layers,
    find_decoder_layers,
    read_input,
    read_output,
)
from vllm_overlay.capture.limits import describe_stream, describe_streams
from vllm_overlay.capture.taps import Taps, install_taps

HIDDEN = 8
TOKENS = 3


class Plain(nn.Module):
    """A layer that has a parameter, as every layer has, and adds one to the stream."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(HIDDEN))

    def forward(self, hidden_states: torch.Tensor, positions: torch.Tensor | None = None) -> Any:
        return hidden_states + self.weight


class KeyValueSharer(Plain):
    """As HunYuan: (positions, hidden, residual, kv) -> (hidden, residual, kv)."""

    def forward(self, positions: Any, hidden_states: Any, residual: Any, kv_states: Any = None) -> Any:
        residual = hidden_states if residual is None else hidden_states + residual
        return hidden_states * 0 + self.weight, residual, (hidden_states, hidden_states)


class ResidualLast(Plain):
    """As Kimi Linear: the residual is the last of three; the other may be None."""

    def forward(self, positions: Any, hidden_states: Any, residual: Any, prefix_sum: Any = None, **kwargs: Any) -> Any:
        residual = hidden_states if residual is None else hidden_states + residual
        hidden_states = hidden_states * 0 + self.weight
        return hidden_states, prefix_sum, residual


class ReturnsStale(Plain):
    """As StableLM: returns a residual that no layer takes; the stream is the first alone."""

    def forward(self, positions: Any, hidden_states: Any) -> Any:
        residual = hidden_states
        return hidden_states + self.weight, residual


class Summed(Plain):
    """As MiniCPM and Gemma 4: takes a residual and returns (hidden, None)."""

    def forward(self, positions: Any, hidden_states: Any, residual: Any, per_layer_input: Any = None) -> Any:
        return hidden_states + self.weight, None


class OwnResidual(Plain):
    """As Cohere and EXAONE 4: takes and returns a residual, and the one that it takes is not looked at."""

    def forward(self, positions: Any, hidden_states: Any, residual: Any) -> Any:
        residual = hidden_states
        hidden_states = hidden_states + self.weight
        return hidden_states, residual


class Delegating(Plain):
    """Its tuple is made elsewhere, and is longer than a pair."""

    def forward(self, positions: Any, hidden_states: Any, residual: Any) -> Any:
        return self.make(hidden_states, residual)

    def make(self, hidden_states: Any, residual: Any) -> Any:
        return hidden_states, residual, residual


class Nameless(Plain):
    def forward(self, positions: Any, hidden_states: Any, residual: Any) -> Any:
        hidden_states = hidden_states + residual
        return hidden_states, positions, hidden_states


class OfTransformers(Plain):
    """As transformers 4 in vLLM's backend: [1, tokens, hidden], in a tuple of one."""

    def forward(self, hidden_states: Any, attention_mask: Any = None, **kwargs: Any) -> Any:
        return (hidden_states + self.weight,)


def tap(*layers: nn.Module, ids: tuple[int, ...] = (0, 1)) -> Taps:
    return install_taps(layers, ids, max_tokens=16, hidden_size=HIDDEN, dtype=torch.float32)


@pytest.mark.parametrize("kind", [KeyValueSharer, ResidualLast])
@torch.no_grad()
def test_a_residual_is_found_by_its_name_in_a_longer_tuple(kind: type[Plain]) -> None:
    layer = kind()
    taps = tap(layer)
    hidden, residual = torch.randn(TOKENS, HIDDEN), torch.randn(TOKENS, HIDDEN)
    returned = layer(None, hidden, residual=residual)
    assert len(returned) == 3
    assert torch.equal(taps.buffer[:TOKENS, 0], hidden + residual)
    assert torch.equal(taps.buffer[:TOKENS, 1], hidden * 0 + layer.weight + (hidden + residual))


@pytest.mark.parametrize("kind", [ReturnsStale, OwnResidual])
@torch.no_grad()
def test_a_residual_that_no_layer_looks_at_is_no_part_of_the_stream(kind: type[Plain]) -> None:
    layer = kind()
    taps = tap(layer)
    hidden = torch.randn(TOKENS, HIDDEN)
    stale = [torch.randn(TOKENS, HIDDEN)] if kind is OwnResidual else []
    _, residual = layer(None, hidden, *stale)
    assert torch.equal(residual, hidden)
    assert torch.equal(taps.buffer[:TOKENS, 0], hidden)
    assert torch.equal(taps.buffer[:TOKENS, 1], hidden + 1)


@torch.no_grad()
def test_a_residual_may_be_none() -> None:
    layer = Summed()
    taps = tap(layer)
    hidden = torch.randn(TOKENS, HIDDEN)
    layer(None, hidden, None, per_layer_input=hidden)
    assert torch.equal(taps.buffer[:TOKENS], torch.stack([hidden, hidden + 1], dim=1))


@torch.no_grad()
def test_a_layer_of_transformers_has_a_batch_of_one() -> None:
    layer = OfTransformers()
    taps = tap(layer)
    hidden = torch.randn(1, TOKENS, HIDDEN)
    (returned,) = layer(hidden, attention_mask=None)
    assert torch.equal(returned, hidden + 1)
    assert torch.equal(taps.buffer[:TOKENS, 1], hidden[0] + 1)


def test_a_tuple_that_does_not_say_which_is_the_residual_is_refused_by_name() -> None:
    with pytest.raises(TapError, match=r"Nameless returns a tuple of 3, \(hidden_states, positions, hidden_states\)"):
        tap(Nameless())


def test_a_tuple_that_is_longer_than_the_forward_says_is_refused_by_name() -> None:
    layer = Delegating()
    tap(layer)
    with pytest.raises(TapError, match="Delegating returns a tuple of 3; expected one tensor"):
        layer(None, torch.zeros(TOKENS, HIDDEN), torch.zeros(TOKENS, HIDDEN))


class TakesX(Plain):
    def forward(self, positions: Any, x: Any, residual: Any = None, scaling: Any = None) -> Any:
        return x if residual is None else x + residual, None


class TakesInputs(Plain):
    def forward(self, positions: Any, inputs: Any, residual: Any = None, scaling: Any = None) -> Any:
        return inputs if residual is None else inputs + residual, None


class TakesHiddenStates(Plain):
    def forward(self, positions: Any, hidden_states: Any, residual: Any = None, scaling: Any = None) -> Any:
        return hidden_states if residual is None else hidden_states + residual, None


@pytest.mark.parametrize("name", ["hidden_states", "x", "inputs"])
@pytest.mark.parametrize("by", ["position", "keyword"])
@torch.no_grad()
def test_the_stream_is_found_whatever_its_name_and_however_it_is_given(name: str, by: str) -> None:
    """CASES 13: id 0 works on every architecture."""
    layer = {"hidden_states": TakesHiddenStates, "x": TakesX, "inputs": TakesInputs}[name]()
    assert read_input(layer) == StreamInput(name, 1, "residual", 2)
    hidden = torch.randn(TOKENS, HIDDEN)
    taps = install_taps([layer], (0,), max_tokens=16, hidden_size=HIDDEN, dtype=torch.float32)
    layer(None, hidden, scaling=1) if by == "position" else layer(positions=None, **{name: hidden})
    assert torch.equal(taps.buffer[:TOKENS, 0], hidden)


@pytest.mark.parametrize("shape", [(4, TOKENS, HIDDEN), (TOKENS, 4, HIDDEN), (TOKENS, 4 * HIDDEN)])
def test_more_than_one_stream_is_refused_by_name(shape: tuple[int, ...]) -> None:
    """AltUp stacks streams in front, hyper-connections behind the tokens or side by side."""
    layer = Plain()
    layer.forward = lambda hidden_states: hidden_states  # type: ignore[assignment, misc]
    tap(layer)
    with pytest.raises(TapError, match="not one residual stream of width 8"):
        layer(torch.zeros(shape))
    assert describe_stream("L", "hidden states", None, HIDDEN) is not None


def test_where_the_stream_is_in_what_a_layer_returns() -> None:
    found = [read_output(kind()).residual for kind in (Plain, KeyValueSharer, ResidualLast, ReturnsStale, OwnResidual)]
    assert found == [None, 1, 2, None, None]


def make_model(**lists: nn.Module) -> nn.Module:
    model = nn.Module()
    for path, module in lists.items():
        place = model
        *parents, last = path.split("__")
        for parent in parents:
            if not hasattr(place, parent):
                place.add_module(parent, nn.Module())
            place = getattr(place, parent)
        place.add_module(last, module)
    return model


def make_layers(count: int, kind: type[nn.Module] = Plain) -> nn.ModuleList:
    return nn.ModuleList([kind() for _ in range(count)])


def test_a_text_model_that_calls_its_stack_an_encoder_is_found_beside_a_vision_tower() -> None:
    """As GLM-4V, where both have the same depth."""
    model = make_model(
        transformer__encoder__layers=make_layers(4), transformer__vision__transformer__layers=make_layers(4)
    )
    assert find_decoder_layers(model, 4) == list(model.get_submodule("transformer.encoder.layers"))  # type: ignore[arg-type]


def test_an_encoder_beside_a_decoder_is_left_out() -> None:
    model = make_model(model__encoder__layers=make_layers(4), model__decoder__layers=make_layers(4))
    assert find_decoder_layers(model, 4) == list(model.get_submodule("model.decoder.layers"))  # type: ignore[arg-type]


def test_layers_are_counted_and_not_their_attention() -> None:
    """transformers counts LongCat's two attentions in each layer, and vLLM holds a layer of both."""
    longcat = SimpleNamespace(model_type="longcat_flash", num_layers=4, num_hidden_layers=8)
    assert count_layers(longcat) == 4
    assert count_layers(SimpleNamespace(model_type="llama", num_hidden_layers=8)) == 8


def test_only_a_vision_tower_is_no_decoder() -> None:
    with pytest.raises(TapError, match="found none"):
        find_decoder_layers(make_model(vision_tower__layers=make_layers(4)), 4)


def test_layers_are_known_by_what_they_take_and_not_only_by_their_name() -> None:
    """Falcon-H1's are called FalconH1ParallelHybrid; a list of something else of that length is none."""
    model = make_model(model__layers=make_layers(4), model__rotary=nn.ModuleList([nn.Identity() for _ in range(4)]))
    assert find_decoder_layers(model, 4) == list(model.get_submodule("model.layers"))  # type: ignore[arg-type]


def test_a_list_that_is_held_twice_is_one() -> None:
    """As Gemma 3n's, whose model hands its layers to a part of it."""
    layers = make_layers(4)
    model = make_model(model__layers=layers, model__part__layers=nn.ModuleList(list(layers)))
    assert find_decoder_layers(model, 4) == list(layers)


def test_a_model_whose_configuration_says_that_it_loops_is_refused_by_name() -> None:
    """As IQuestLoopCoder, of whose two passes the buffer would hold the last."""

    class Configured:
        def get_text_config(self) -> Configured:
            return self

        def to_dict(self) -> dict[str, Any]:
            return {"loop_num": 2}

    model = make_model(model__layers=make_layers(4))
    model.config = Configured()  # type: ignore[assignment]
    with pytest.raises(TapError, match="loop_num=2: the model runs its layers 2 times"):
        find_decoder_layers(model, 4)


def test_experts_inside_the_layers_are_no_layers() -> None:
    layers = make_layers(4)
    for layer in layers:
        layer.experts = make_layers(4)
    assert find_decoder_layers(make_model(model__layers=layers), 4) == list(layers)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"hc_mult": 4}, "hc_mult=4: the layers hand on 4 streams"),
        ({"hc_mult": 4, "enable_ihc": True}, "hc_mult=4"),
        ({"hc_count": 4}, "hc_count=4"),
        ({"altup_num_inputs": 4}, "altup_num_inputs=4"),
        ({"loop_num": 2}, "loop_num=2: the model runs its layers 2 times"),
        ({"total_ut_steps": 3}, "total_ut_steps=3"),
        ({"H_cycles": 2}, "H_cycles=2"),
        ({"attn_res_block_size": 12}, "attn_res_block_size=12"),
        ({"bskcn_tv": [0.9, 0.8]}, "bskcn_tv=[0.9, 0.8]: between some layers the stream is mixed"),
    ],
)
def test_a_configuration_without_one_stream_is_refused_by_name(config: dict[str, Any], said: str) -> None:
    refusal = describe_streams(config)
    assert refusal is not None
    assert refusal.startswith(said)


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"hc_mult": 4, "enable_ihc": False},
        {"hc_mult": 4, "mhc": False},
        {"hc_mult": 1},
        {"loop_num": None},
        {"attn_res_block_size": None},
    ],
)
def test_a_configuration_with_one_stream_is_not_refused(config: dict[str, Any]) -> None:
    assert describe_streams(config) is None
