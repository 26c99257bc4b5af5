"""A draft in the form of speculators 0.9, whose `Eagle3DraftModel` and vLLM's `SpeculatorsConfig` read it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from vllm_overlay.errors import OverlayError

SPECULATORS_VERSION = "0.9.0"
OF_THE_SPECULATOR = (  # the layer's own config holds the other fields
    "draft_vocab_size",
    "norm_before_residual",
    "norm_before_fc",
    "fc_norm",
    "norm_output",
    "eagle_aux_hidden_state_layer_ids",
)


def refuse_what_speculators_cannot_hold(draft: dict[str, Any]) -> None:
    """draft: the section of a run's config.json. Raises OverlayError: names the option of `train` that does not fit."""
    if draft["hidden_size"] != draft["target_hidden_size"]:
        raise OverlayError(
            f"--hidden-size {draft['hidden_size']}: the target's hidden size is {draft['target_hidden_size']}, and a "
            "speculators draft must have the same; export with --format vllm"
        )
    if draft["norm_before_fc"] and draft["fc_norm"]:
        raise OverlayError(
            "--norm-before-fc and --fc-norm: a speculators draft has one of them at most; export with --format vllm"
        )


def speculators_config(plain: dict[str, Any], facts: dict[str, Any]) -> dict[str, Any]:
    """config.json of speculators 0.9 from the plain one and the facts of a run.

    `vllm_overlay` is in the layer's config too: of the whole file, that is what vLLM keeps.
    """
    target = facts["target"]
    moved = {name: plain[name] for name in OF_THE_SPECULATOR if name in plain}
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": SPECULATORS_VERSION,
        **moved,  # norm_before_residual is always among them: vLLM takes its absence for true
        "target_hidden_size": facts["draft"]["target_hidden_size"],
        "tie_word_embeddings": False,
        "torch_dtype": plain["torch_dtype"],
        "transformer_layer_config": {
            name: value for name, value in plain.items() if name != "architectures" and name not in moved
        },
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {"proposal_type": "greedy", "speculative_tokens": facts["settings"]["ttt_steps"]},
            ],
            "verifier": {"name_or_path": target["name"], "architectures": _architectures(Path(target["path"]))},
        },
        "vllm_overlay": plain["vllm_overlay"],
    }


def speculators_tensors(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same tensors by speculators' names."""
    return {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}


def _architectures(target: Path) -> list[str]:
    """The target's, or none where its folder is not here any more, as speculators writes it then."""
    if not (target / "config.json").is_file():
        return []
    return list(json.loads((target / "config.json").read_text()).get("architectures") or [])
