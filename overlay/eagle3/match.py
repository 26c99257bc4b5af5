"""Whether vLLM would feed a draft of ours what it was trained on: the same layers of the same target.

Sizes and layer ids must be the same. The weights need not be: the fingerprint covers config.json and every weight
file, so that a quantised copy or a fine-tune has another one. What tells those from a stranger of the same sizes is a
sample of the embeddings, which quantisation leaves alone and fine-tuning hardly moves.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_overlay.eagle3.target import NUM_SAMPLES, sample_embeddings
from vllm_overlay.errors import OverlayError
from vllm_overlay.fingerprint import fingerprint_model

# Cosine of two samples of embeddings, 32 values: about 0 for strangers, with a deviation of 0.18.
RELATED = 0.8


class DraftMismatchError(OverlayError):
    """A draft would be fed what it was not trained on."""


@dataclass(frozen=True)
class Sizes:
    """Of a target. None where an older export did not write it, or the served model's configuration has no such."""

    num_hidden_layers: int | None
    hidden_size: int | None
    vocab_size: int | None


@dataclass(frozen=True)
class TrainedOn:
    """What an exported draft says of its training. embedding_sample: empty where it was not written."""

    target: str
    fingerprint: str
    layer_ids: tuple[int, ...]
    sizes: Sizes
    embedding_sample: tuple[float, ...]


@dataclass(frozen=True)
class Served:
    """What vLLM would do. model: a folder or a hub's name. config: the model's own configuration, for its fingerprint.

    asked_layer_ids: what the draft's configuration asks for; fed_layer_ids: what this release feeds, in its order.
    """

    model: str
    config: Mapping[str, Any]
    sizes: Sizes
    asked_layer_ids: tuple[int, ...]
    fed_layer_ids: tuple[int, ...]
    release: str


def read_trained_on(facts: Mapping[str, Any]) -> TrainedOn:
    """From `vllm_overlay` in an exported config.json. Raises DraftMismatchError: it is not as `export` writes it."""
    try:
        trained = TrainedOn(
            target=str(facts["target"]),
            fingerprint=str(facts["target_fingerprint"]),
            layer_ids=tuple(map(int, facts["layer_ids"])),
            sizes=Sizes(facts["target_layers"], facts.get("target_hidden_size"), facts.get("target_vocab_size")),
            embedding_sample=tuple(map(float, facts.get("target_embedding_sample", ()))),
        )
        if len(trained.embedding_sample) not in (0, NUM_SAMPLES):
            raise ValueError(f"{len(trained.embedding_sample)} values of target_embedding_sample")
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise DraftMismatchError(
            f"vllm_overlay in its config.json was changed and cannot be read ({type(error).__name__}: {error}); export "
            "it again"
        ) from error
    return trained


def find_misfit(trained: TrainedOn, served: Served) -> str | None:
    """Why the draft would accept next to nothing, and what to do; None if it was trained on what it would be fed."""
    return _compare_sizes(trained, served) or _compare_layers(trained, served) or _compare_embeddings(trained, served)


def describe_other_weights(trained: TrainedOn, served: Served) -> str | None:
    """For a draft without a misfit: how the served target is not the very one; None if it is, or is called so."""
    if _is_same(trained, served):
        return None
    return (
        f"trained on {trained.target} (fingerprint {trained.fingerprint[:12]}), and {served.model} has the same sizes "
        "and other files: a quantised copy, a fine-tune or the same weights by another way. Texts are right with any "
        "draft; measure with `vllm-overlay evaluate` how much it still accepts"
    )


def _compare_sizes(trained: TrainedOn, served: Served) -> str | None:
    differing = [
        f"{name} {wanted}, not {getattr(served.sizes, name)}"
        for name, wanted in vars(trained.sizes).items()
        if wanted is not None and wanted != getattr(served.sizes, name)
    ]
    if not differing:
        return None
    return (
        f"trained on another target than {served.model}: {trained.target} has {', '.join(differing)}; serve it with "
        "that one"
    )


def _compare_layers(trained: TrainedOn, served: Served) -> str | None:
    wanted, fed = trained.layer_ids, served.fed_layer_ids
    if wanted == fed:
        return None
    return (
        f"trained on layers {_join(wanted)} of {trained.target}, and vLLM {served.release} would feed it layers "
        f"{_join(fed)}; {_advise(wanted, served)}"
    )


def _advise(wanted: tuple[int, ...], served: Served) -> str:
    if served.asked_layer_ids != wanted:
        return f"its config.json was changed: set eagle_aux_hidden_state_layer_ids to {list(wanted)} again"
    if served.fed_layer_ids == tuple(sorted(wanted)):
        return f"every release feeds them in ascending order: train with --features {_join(sorted(wanted), ',')}"
    return "serve it with vLLM 0.18 or newer, which feeds any layers, or train again with the default --features"


def _compare_embeddings(trained: TrainedOn, served: Served) -> str | None:
    if _is_same(trained, served) or not trained.embedding_sample or not Path(served.model).is_dir():
        return None
    vocab_size, hidden_size = trained.sizes.vocab_size, trained.sizes.hidden_size
    if vocab_size is None or hidden_size is None:
        return None
    sample = sample_embeddings(Path(served.model), vocab_size, hidden_size)
    if not sample or _cosine(trained.embedding_sample, sample) >= RELATED:
        return None
    return (
        f"trained on another target than {served.model}, of the same sizes: {trained.target} has other embeddings, so "
        "it is neither a fine-tune nor a quantised copy; serve it with that one"
    )


def _is_same(trained: TrainedOn, served: Served) -> bool:
    folder = Path(served.model)
    if not folder.is_dir():
        # By a hub's name the fingerprint covers what transformers makes of config.json, which varies by its release.
        return served.model == trained.target or fingerprint_model(served.model, served.config) == trained.fingerprint
    # A folder in mistral's own format has no config.json.
    return (folder / "config.json").is_file() and fingerprint_model(served.model, {}) == trained.fingerprint


def _cosine(a: Sequence[float], b: Sequence[float]) -> float:
    """1.0 for two samples of zeros only, which say nothing."""
    product = math.hypot(*a) * math.hypot(*b)
    return sum(x * y for x, y in zip(a, b, strict=True)) / product if product else 1.0


def _join(ids: Sequence[int], by: str = ", ") -> str:
    return by.join(map(str, ids))
