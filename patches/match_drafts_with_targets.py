"""A draft that `vllm-overlay export` wrote is served only with the layers and the target that it was trained on.

Why: nothing in vLLM compares them. A draft that is fed other layers, or another model's, is served, accepts next to
nothing and raises nothing. Compared as soon as both configurations are read, before any process reads a weight. What it
does not change: drafts of others, other methods of speculation, and what vLLM feeds.
"""

from __future__ import annotations

import logging
from typing import Any

import wrapt

from vllm_overlay.activation import current_ledger, current_settings
from vllm_overlay.compat.releases import seam_for
from vllm_overlay.patch import Patch

logger = logging.getLogger("vllm_overlay.eagle3")

FIELDS = ("method", "model", "draft_model_config", "target_model_config")


def build(original: Any) -> Any:
    def configure_and_match(wrapped: Any, config: Any, args: Any, kwargs: Any) -> Any:
        configured = wrapped(*args, **kwargs)
        if config.method == "eagle3":
            _match(config)
        return configured

    return wrapt.FunctionWrapper(original, configure_and_match)


def _match(config: Any) -> None:
    from vllm_overlay.eagle3.match import DraftMismatchError, describe_other_weights, find_misfit, read_trained_on

    facts = getattr(config.draft_model_config.hf_config, "vllm_overlay", None)
    if facts is None:
        return
    try:
        trained = read_trained_on(facts)
    except DraftMismatchError as error:
        _refuse(config, str(error))
        return
    served = _describe_served(config)
    misfit = find_misfit(trained, served)
    if misfit:
        _refuse(config, misfit)
        return
    remark = describe_other_weights(trained, served)
    if remark:
        logger.warning("draft %s: %s", config.model, remark)


def _refuse(config: Any, misfit: str) -> None:
    """Raises DraftMismatchError, or warns where the policy says so."""
    from vllm_overlay.eagle3.match import DraftMismatchError

    if current_settings().policy == "strict":
        raise DraftMismatchError(f"draft {config.model}: {misfit}; VLLM_OVERLAY_POLICY=warn serves it all the same")
    logger.warning("draft %s: %s", config.model, misfit)


def _describe_served(config: Any) -> Any:
    from vllm_overlay.eagle3.match import Served, Sizes

    target, ledger = config.target_model_config, current_ledger()
    sizes = Sizes(
        *(getattr(target.hf_text_config, name, None) for name in ("num_hidden_layers", "hidden_size", "vocab_size"))
    )
    asked = tuple(getattr(config.draft_model_config.hf_config, "eagle_aux_hidden_state_layer_ids", None) or ())
    fed = seam_for(ledger.release).fed_layer_ids(asked, sizes.num_hidden_layers or 0)
    return Served(target.model, target.hf_config.to_dict(), sizes, asked, fed, ledger.vllm_version)


def verify() -> None:
    from vllm.config.speculative import SpeculativeConfig

    missing = [name for name in FIELDS if name not in SpeculativeConfig.__dataclass_fields__]
    if missing:
        raise RuntimeError(f"expected fields {', '.join(FIELDS)} of SpeculativeConfig, found no {', '.join(missing)}")


PATCH = Patch(
    name="match_drafts_with_targets",
    targets=("{SPECULATIVE_CONFIG}:SpeculativeConfig.__post_init__",),
    vllm=">=0.11",
    process="front end",
    relies_on={},
    upstream="none: vLLM does not know what a draft was trained on",
    remove_when="vLLM compares a draft's layers and target with those that it serves",
    build=build,
    verify=verify,
)
