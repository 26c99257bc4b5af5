"""The rehearsal of the model: what was made small, what of it cannot be rehearsed, and what came of it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from vllm_overlay.check.installation import Installation
from vllm_overlay.check.line import Line, Verdict
from vllm_overlay.check.model import ModelFacts
from vllm_overlay.check.rehearsal_options import RehearsalOptions
from vllm_overlay.errors import OverlayError
from vllm_overlay.model_shape import ConfigError
from vllm_overlay.rehearsal.bounded import run_bounded
from vllm_overlay.rehearsal.defaults import DefaultsError, complete, read_defaults
from vllm_overlay.rehearsal.depth import map_layer_ids
from vllm_overlay.rehearsal.fields import Change, is_tower
from vllm_overlay.rehearsal.plan import Outcome, RehearsalPlan
from vllm_overlay.rehearsal.shrink import Small, shrink

MOST_RANKS = 2

_SUBJECT = "rehearsal"


def check_rehearsal(
    facts: ModelFacts, ids: Sequence[int], num_ranks: int, installation: Installation, options: RehearsalOptions
) -> Iterator[Line]:
    """Shrink the model, run it, and say what happened."""
    if not 0 < options.seconds < math.inf:
        expected = "a time above 0, with an end"
        yield Line(_SUBJECT, "fails", expected, str(options.seconds), "give --rehearse-timeout seconds")
        return
    code = facts.file.parent if options.trust_remote_code else None
    try:
        config, unknown = _complete(facts, code, options.seconds)
        small = shrink(config)
    except ConfigError as error:
        yield Line(_SUBJECT, "fails", "sizes that can be made small", str(error))
        return
    except OSError as error:
        yield _describe_folder(error)
        return
    yield _describe_small(small, facts, unknown)
    is_cpu = installation.platform == "cpu"
    dtype = "float32" if is_cpu and not _has_linear_attention(facts) else "bfloat16"
    plan = RehearsalPlan(
        dtype=dtype,
        tensor_parallel_size=min(num_ranks, MOST_RANKS),
        from_transformers=dtype == "float32",
        trust_remote_code=options.trust_remote_code,
        is_cpu=is_cpu,
        special_ids=small.special_ids,
    )
    layer_ids = map_layer_ids(ids, facts.num_hidden_layers, len(small.layers))
    try:
        outcome = run_bounded(small, plan, layer_ids, options.seconds, code)
    except OSError as error:
        yield _describe_folder(error)
        return
    except OverlayError as error:
        yield Line(_SUBJECT, "fails", "a rehearsal that ends", str(error))
        return
    yield from _list_left_out(small, facts, num_ranks, plan, outcome)
    asked = (
        f"{_join(ids)} rehearsed as {_join(layer_ids[: len(ids)])}" if len(layer_ids) > len(ids) else "all rehearsed"
    )
    yield _describe_outcome(outcome, plan, f"layer ids {asked}", options.seconds)


def _complete(facts: ModelFacts, code: Path | None, seconds: float) -> tuple[Mapping[str, Any], str]:
    """config.json with what its class adds of layers and sizes, or as it is and why nobody knows what that would be."""
    try:
        return complete(facts.config, read_defaults(facts.config, code, seconds)), ""
    except DefaultsError as error:
        return facts.config, str(error)


def _describe_folder(error: OSError) -> Line:
    return Line(_SUBJECT, "fails", "room in the temporary folder", str(error), "make room, or set TMPDIR")


def _describe_small(small: Small, facts: ModelFacts, unknown: str) -> Line:
    found = f"{len(small.layers)} of {facts.num_hidden_layers} layers: {_join(small.layers)}, counted from 0"
    details = "\n".join(map(_describe_change, small.changes))
    expected = "each kind of layer, little else"
    if unknown:
        found = f"{found}; what the file leaves to its class cannot be read: {unknown}"
        advice = "kinds of layers that only the class knows are not rehearsed"
        return Line("small model", "warning", expected, found, advice, details)
    return Line("small model", "ok", expected, found, details=details)


def _describe_change(change: Change) -> str:
    old, new = (_shorten(json.dumps(value)) for value in (change.old, change.new))
    return f"{change.path}: {old} -> {'taken out' if change.new is None else new}"


def _shorten(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}..."


def _list_left_out(
    small: Small, facts: ModelFacts, num_ranks: int, plan: RehearsalPlan, outcome: Outcome
) -> Iterator[Line]:
    """What the real run does and the rehearsal does not."""
    parts = ["the published weights, compilation and graphs"]
    if small.quantised:
        parts.append(f"quantisation ({', '.join(small.quantised)}): run with weights that are not quantised")
    towers = [name for name, value in facts.config.items() if name != facts.text_key and is_tower(name, value)]
    if towers:
        parts.append(f"{', '.join(towers)} and the processor of images or sounds: run by text")
    if plan.is_cpu and facts.text.get("kv_lora_rank"):
        parts.append("latent attention, which a CPU computes as ordinary attention here (VLLM_MLA_DISABLE=1)")
    ranks = outcome.ranks or plan.tensor_parallel_size
    if ranks < num_ranks:
        parts.append(f"{num_ranks} tensor-parallel ranks: run with {ranks}")
    verdict: Verdict = "ok" if len(parts) == 1 else "warning"
    advice = "" if len(parts) == 1 else "these parts of the model are first met in the real run"
    yield Line("not rehearsed", verdict, "all of the model", "; ".join(parts), advice)


def _describe_outcome(outcome: Outcome, plan: RehearsalPlan, asked: str, seconds: float) -> Line:
    expected = "a small model that runs, and is captured as it computes"
    weights = (
        f"; weights as transformers saves them do not load: {outcome.weights_failed}" if outcome.weights_failed else ""
    )
    if outcome.verdict == "died":
        found = f"died while {outcome.stage}: {outcome.reason}{weights}"
        return Line(_SUBJECT, "fails", expected, found, _advise(outcome, plan, seconds), outcome.details)
    if outcome.verdict == "wrong":
        advice = "capture takes the wrong states of it: report this"
        return Line(_SUBJECT, "fails", expected, f"{outcome.reason}{weights}", advice, outcome.details)
    ranks = outcome.ranks or plan.tensor_parallel_size
    ran = f"{outcome.model_class} in {plan.dtype}, {ranks} rank{'s' if ranks > 1 else ''}, {outcome.records} records"
    if outcome.verdict == "equal":
        return Line(_SUBJECT, "ok", expected, f"{ran} with {outcome.rows} rows equal to transformers'; {asked}")
    alike = "each layer's states are what the next one takes, bit for bit"
    found = f"{ran} with {outcome.rows} rows; {alike}; {asked}; not compared with transformers: {outcome.reason}"
    if outcome.weights_failed:
        advice = "see whether its load_weights takes the names of the published weights: else the real load dies so"
        return Line(_SUBJECT, "warning", expected, f"{found}{weights}", advice, outcome.details)
    if outcome.difference is None:
        return Line(_SUBJECT, "ok", expected, found)
    found = f"{ran} with {outcome.rows} rows; {alike}; {asked}; {outcome.reason}"
    return Line(_SUBJECT, "warning", expected, found, "this vLLM computes another model than transformers does")


def _advise(outcome: Outcome, plan: RehearsalPlan, seconds: float) -> str:
    if outcome.timed_out:
        return f"give it more than {seconds:.0f} s with --rehearse-timeout, or see where it hangs"
    if "trust_remote_code" in outcome.details and not plan.trust_remote_code:
        return "with --trust-remote-code the rehearsal runs the Python files beside config.json"
    if "Free memory on device" in outcome.details:
        return "a rehearsal takes a fifth of the device's memory, and others hold it: free some, or use another device"
    return "the real run would die so too, if it is not for what was made small: see `small model`"


def _has_linear_attention(facts: ModelFacts) -> bool:
    """vLLM's linear attention on a CPU takes 16 bits only."""
    return any(name.startswith("linear_") for name in facts.text)


def _join(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))
