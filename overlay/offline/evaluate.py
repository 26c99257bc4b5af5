"""How much of a draft the target accepts: by vLLM's own counters where it speculates, and by our chain in torch.

The plain engine writes the greedy texts and captures the states on the way; the chain needs no engine. Where this vLLM
runs speculative decoding on this machine, a second engine serves the draft, its counters are read, and its texts must
be the plain ones, token for token.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_overlay import activation
from vllm_overlay.compat.releases import seam_for
from vllm_overlay.errors import OverlayError
from vllm_overlay.offline.capture import NOT_FOR_COMMANDS

if TYPE_CHECKING:
    from vllm import LLM

    from vllm_overlay.eagle3.acceptance import Acceptance


@dataclass(frozen=True)
class EvaluationSettings:
    """`max_tokens` generated for each prompt, `num_draft_tokens` proposed at each check."""

    model: str
    draft: Path
    num_draft_tokens: int
    max_tokens: int
    ignore_eos: bool
    engine_options: tuple[str, ...]


@dataclass(frozen=True)
class Texts:
    """Generated token ids, prompt by prompt, and how long the engine took for all of them."""

    token_ids: tuple[tuple[int, ...], ...]
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        return sum(map(len, self.token_ids)) / self.seconds


def evaluate(settings: EvaluationSettings, prompts: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Acceptance per position and acceptance length as plain JSON values, by every method that runs here.

    Errors: OverlayError when the draft cannot be loaded or its layer ids are not in its config.json.
    """
    layer_ids = read_layer_ids(settings.draft)
    with tempfile.TemporaryDirectory(prefix="vllm-overlay-evaluate-") as folder:
        plain = _generate_and_capture(settings, prompts, layer_ids, Path(folder, "store"))
        chain = _measure_chain(settings, Path(folder, "store"), len(prompts))
    report: dict[str, Any] = {
        "draft": str(settings.draft),
        "model": settings.model,
        "vllm_version": activation.current_ledger().vllm_version,
        "num_prompts": len(prompts),
        "num_draft_tokens_a_check": settings.num_draft_tokens,
        "problem": chain.problem,
        "chain": describe(chain),
        "plain_tokens_per_second": plain.tokens_per_second,
        "vllm": None,
    }
    if can_speculate():
        served, texts = _serve(settings, prompts)
        same = [
            mine[: settings.max_tokens] == yours for mine, yours in zip(plain.token_ids, texts.token_ids, strict=True)
        ]
        report["vllm"] = describe(served)
        # The counters see only that nothing is accepted; the chain reads the draft's tensors too.
        report["problem"] = chain.problem or served.problem
        report["texts_equal"] = sum(same)
        report["speculative_tokens_per_second"] = texts.tokens_per_second
    return report


def describe(acceptance: Acceptance) -> dict[str, Any]:
    """Counts and ratios as plain JSON values."""
    return {
        **asdict(acceptance),
        "rates": list(acceptance.rates),
        "acceptance_length": acceptance.acceptance_length,
    }


def read_layer_ids(draft: Path) -> tuple[int, ...]:
    """The features that an exported draft takes, as layer ids. Errors: OverlayError when its config.json names none."""
    file = draft / "config.json"
    if not file.is_file():
        raise OverlayError(f"{draft} has no config.json: name a folder that `export` wrote")
    ids = json.loads(file.read_text(encoding="utf-8")).get("eagle_aux_hidden_state_layer_ids")
    if not ids:
        raise OverlayError(f"{draft}/config.json names no eagle_aux_hidden_state_layer_ids: which states does it take?")
    return tuple(int(layer_id) for layer_id in ids)


def can_speculate() -> bool:
    """Whether this vLLM runs speculative decoding on this machine's device."""
    from vllm.platforms import current_platform

    return not current_platform.is_cpu() or seam_for(activation.current_ledger().release).SPECULATIVE_DECODING_ON_CPU


def _generate_and_capture(
    settings: EvaluationSettings, prompts: Sequence[Sequence[int]], layer_ids: Sequence[int], store: Path
) -> Texts:
    """Greedy texts that go on `num_draft_tokens` beyond `max_tokens`, so that the last checks have text to check."""
    os.environ["VLLM_OVERLAY"] = "1"
    os.environ["VLLM_OVERLAY_CAPTURE"] = str(store)
    os.environ["VLLM_OVERLAY_LAYERS"] = ",".join(map(str, layer_ids))
    # The draft is fed the states that the model computed, not what a store in 8 bits would keep of them.
    for name in (*NOT_FOR_COMMANDS, "VLLM_OVERLAY_DTYPE"):
        os.environ.pop(name, None)
    activation.activate()
    from vllm_overlay.offline.engine import build_engine, shut_down

    llm = build_engine(settings.model, settings.engine_options)
    try:
        texts = _generate(llm, prompts, settings.max_tokens + settings.num_draft_tokens, settings.ignore_eos)
        llm.collective_rpc("overlay_flush")
    finally:
        shut_down(llm)
        # The engine that serves the draft runs without capture: its rejected rows are nobody's states.
        activation.undo_all()
        del os.environ["VLLM_OVERLAY_CAPTURE"]
    return texts


def _measure_chain(settings: EvaluationSettings, store: Path, num_prompts: int) -> Acceptance:
    from vllm_overlay.eagle3.acceptance import load_draft, measure_acceptance, pool
    from vllm_overlay.eagle3.target import load_target
    from vllm_overlay.store import Store

    loaded = load_draft(settings.draft, load_target(settings.model).embed_tokens)
    with Store.open(store) as opened:
        complete = sum(record.complete for record in opened)
        if complete != num_prompts:
            raise OverlayError(f"expected {num_prompts} complete records of the plain texts, found {complete}")
        return pool(
            measure_acceptance(
                loaded, record.hidden_states, record.token_ids, record.num_prompt_tokens, settings.num_draft_tokens
            )
            for record in opened
        )


def _serve(settings: EvaluationSettings, prompts: Sequence[Sequence[int]]) -> tuple[Acceptance, Texts]:
    from vllm import LLM

    from vllm_overlay.offline.engine import parse_options, shut_down

    arguments = parse_options(settings.engine_options)
    speculative = {
        "method": "eagle3",
        "model": str(settings.draft),
        "num_speculative_tokens": settings.num_draft_tokens,
    }
    llm = LLM(model=settings.model, speculative_config=speculative, disable_log_stats=False, **arguments)
    try:
        texts = _generate(llm, prompts, settings.max_tokens, settings.ignore_eos)
        return _read_counters(llm, settings.num_draft_tokens), texts
    finally:
        shut_down(llm)


def _generate(llm: LLM, prompts: Sequence[Sequence[int]], max_tokens: int, ignore_eos: bool) -> Texts:
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=ignore_eos, detokenize=False)
    inputs: list[Any] = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
    started = time.perf_counter()
    outputs = llm.generate(inputs, params)
    seconds = time.perf_counter() - started
    return Texts(tuple(tuple(output.outputs[0].token_ids) for output in outputs), seconds)


def _read_counters(llm: LLM, num_draft_tokens: int) -> Acceptance:
    from vllm_overlay.eagle3.acceptance import Acceptance

    values: dict[str, Any] = {}
    for metric in llm.get_metrics():
        values[metric.name] = getattr(metric, "values", None) or getattr(metric, "value", None)
    per_position = values.get("vllm:spec_decode_num_accepted_tokens_per_pos") or [0] * num_draft_tokens
    return Acceptance(
        int(values.get("vllm:spec_decode_num_drafts") or 0),
        int(values.get("vllm:spec_decode_num_draft_tokens") or 0),
        tuple(int(count) for count in per_position[:num_draft_tokens]),
    )
