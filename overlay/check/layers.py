"""The decoder layers: their class, how the model calls them, what they return, and the ids to be captured."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

from vllm_overlay.capture.limits import STREAM_NAMES, describe_first_layer, describe_output, describe_streams
from vllm_overlay.check.architecture import Served
from vllm_overlay.check.line import Line
from vllm_overlay.check.model import ModelFacts
from vllm_overlay.errors import OverlayError
from vllm_overlay.layer_ids import resolve_layer_ids
from vllm_overlay.source.decoder import Decoder, LayerClass, LoopCall, bind_call

_SHOWN_KINDS = 4
_TRY_FIRST = "capture a few requests before a long run"


def check_layer_ids(layers: str, facts: ModelFacts) -> tuple[Line, tuple[int, ...]]:
    """The ids that are asked for; none if they cannot be."""
    last = facts.num_hidden_layers
    expected = f"ids from 0 (embeddings) to {last} (before the final norm), each once"
    try:
        ids = resolve_layer_ids(layers, last)
    except OverlayError as error:
        advice = f"give --layers ids such as {last // 2},{last}"
        return Line("layers", "fails", expected, str(error), advice), ()
    found = f"{layers}: {', '.join(map(str, ids))}" if layers in ("eagle3", "all") else ", ".join(map(str, ids))
    return Line("layers", "ok", expected, found), ids


def check_decoder_layers(served: Served) -> Iterator[Line]:
    """The class of the layers, the call in the model's forward, and what comes back."""
    decoder = served.decoder
    expected = "one list of decoder layers, in what the class builds"
    if not isinstance(decoder, Decoder):
        found = f"not read: {'; '.join(decoder.reasons)}"
        yield Line("decoder layers", "warning", expected, found, _TRY_FIRST)
        return
    kinds = " and ".join(f"{kind.name} at {kind.place}" for kind in decoder.kinds[:_SHOWN_KINDS])
    more = len(decoder.kinds) - _SHOWN_KINDS
    found = f"{decoder.path} in {decoder.inner.path}: {kinds}{f' and {more} more' if more > 0 else ''}"
    if decoder.kinds:
        yield Line("decoder layers", "ok", expected, found)
    else:
        yield Line("decoder layers", "warning", expected, f"{found}not read: {decoder.unread[0]}", _TRY_FIRST)
    yield from _check_calls(decoder)
    yield from _check_returns(decoder)


def check_first_layer(served: Served, ids: Sequence[int]) -> Iterator[Line]:
    """Whether layer id 0, if it is asked for, can be captured from the first layer's forward."""
    if 0 not in ids or not isinstance(served.decoder, Decoder):
        return
    for kind in served.decoder.kinds[:1]:
        refusal = describe_first_layer(kind.name, [one.name for one in kind.parameters])
        if refusal:
            expected = f"a first layer that takes one of {', '.join(STREAM_NAMES)}"
            yield Line("layer id 0", "fails", expected, refusal.partition(";")[0], "leave out id 0")


def check_streams(facts: ModelFacts) -> Iterator[Line]:
    """Whether the configuration says that there is no one residual stream to capture."""
    refusal = describe_streams(facts.text)
    if refusal:
        yield Line("residual stream", "fails", "one, which passes each layer once", refusal, "capture another model")


def check_deepseek(served: Served, facts: ModelFacts) -> Iterator[Line]:
    """What a rewritten forward of DeepSeek-V2/V3 and Kimi-K2.5 died of, 18 minutes into a load."""
    decoder = served.decoder
    if not isinstance(decoder, Decoder) or not any(kind.name.startswith("Deepseek") for kind in decoder.kinds):
        return
    yield Line(
        "DeepSeek class",
        "ok",
        "the class that holds the layers, under the name it has in this vLLM",
        f"{decoder.inner.path} in {decoder.inner.module}, whatever the architecture is called",
    )
    scoring = facts.text.get("scoring_func")
    if facts.text.get("topk_method") == "noaux_tc" and scoring is None:
        advice = "add it to config.json as published: vLLM's routing falls back to softmax"
        yield Line("scoring_func", "warning", "in config.json, for experts routed by noaux_tc", "absent", advice)
    else:
        yield Line("scoring_func", "ok", "in config.json where experts are routed by it", json_word(scoring))
    yield _check_llama_4_scaling(decoder, facts)


def json_word(value: object) -> str:
    """A value of config.json, or that it is absent."""
    return "absent" if value is None else repr(value)


def _check_llama_4_scaling(decoder: Decoder, facts: ModelFacts) -> Line:
    subject = "llama_4_scaling"
    kind = decoder.kinds[0]
    parameter = next((one for one in kind.parameters if one.name == subject), None)
    value = facts.text.get(subject)
    if parameter is None:
        expected, found = "absent: this vLLM's layers take no such argument", f"{json_word(value)} in config.json"
        if value is None:
            return Line(subject, "ok", expected, found)
        return Line(subject, "warning", expected, found, "this vLLM does not read it")
    given = ["by the model's loop" for call in decoder.calls if subject in (*call.positional, *call.keywords)]
    default = f"default {parameter.default}" if parameter.default else "required"
    passed = given[0] if given else "not by the model's loop"
    found = f"{json_word(value)} in config.json; {kind.name} takes it ({default}), passed {passed}"
    expected = "absent from config.json and None to the layers, or present and read"
    if parameter.default is None and not given:
        return Line(subject, "fails", expected, found, "the loop in the model's forward must pass it")
    return Line(subject, "ok", expected, found)


def _check_calls(decoder: Decoder) -> Iterator[Line]:
    expected = "a call in the model's forward that fits the layer's forward"
    if not decoder.calls:
        yield Line("layer call", "warning", expected, f"not read: {decoder.unread[-1]}", _TRY_FIRST)
        return
    for call in decoder.calls:
        misfits = [misfit for kind in decoder.kinds for misfit in bind_call(call, kind)]
        signatures = " and ".join(dict.fromkeys(kind.signature for kind in decoder.kinds)) or "a layer not read"
        found = f"{call.text} at {call.place}, {call.style}; the layer takes {signatures}"
        if misfits:
            advice = "the model would fail in its first step: undo what was changed in this vLLM"
            yield Line("layer call", "fails", expected, f"{found}: {'; '.join(misfits)}", advice)
        else:
            yield Line("layer call", "ok", expected, found)


def _check_returns(decoder: Decoder) -> Iterator[Line]:
    expected = "one tensor, or hidden states and the residual, of width hidden_size"
    for kind in decoder.kinds:
        returned, written = read_output(kind, decoder.calls)
        refusal = describe_output(kind.name, returned, kind.carries_residual)
        if refusal:
            advice = "capture refuses such layers, when the model has been built"
            yield Line("layer output", "fails", expected, refusal.partition(";")[0], advice)
        elif returned:
            yield Line("layer output", "ok", expected, f"{kind.name}: {written}")
        else:
            found = f"not read: {kind.name} returns in more than one way"
            yield Line("layer output", "warning", expected, found, _TRY_FIRST)


def read_output(kind: LayerClass, calls: tuple[LoopCall, ...]) -> tuple[tuple[str, ...], str]:
    """What a layer returns, value by value and as written: by its `return`, or else as the model takes it.

    Empty if neither says.
    """
    taken = max((call.result for call in calls), key=lambda text: len(_list_values(text)), default="")
    written = kind.returns if len(_list_values(kind.returns)) >= len(_list_values(taken)) else taken
    return _list_values(written), written.strip("()")


def _list_values(text: str) -> tuple[str, ...]:
    """The values of an expression or a target, as written; none if it does not say."""
    if not text:
        return ()
    value = ast.parse(text.strip(), mode="eval").body
    return tuple(ast.unparse(one) for one in value.elts) if isinstance(value, ast.Tuple) else (text,)
