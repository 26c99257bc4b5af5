"""A draft in the form of speculators 0.9, whose `Eagle3DraftModel` and vLLM's `SpeculatorsConfig` read it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from vllm_overlay.errors import OverlayError
from vllm_overlay.model_shape import read_config

SPECULATORS_VERSION = "0.9.0"
OF_THE_SPECULATOR = (  # the layer's own config holds the other fields
    "draft_vocab_size",
    "norm_before_residual",
    "norm_before_fc",
    "fc_norm",
    "norm_output",
    "eagle_aux_hidden_state_layer_ids",
)


def convert_to_speculators(
    plain: dict[str, Any], tensors: dict[str, torch.Tensor], facts: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """config.json and tensors of speculators 0.9 from the plain form's and the facts of a run.

    Raises OverlayError: names the option of `train` that this form cannot hold; a target's config.json that is none.
    """
    _refuse_what_it_cannot_hold(facts["draft"])
    return _speculators_config(plain, facts), {
        name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()
    }


def _refuse_what_it_cannot_hold(draft: dict[str, Any]) -> None:
    if draft["hidden_size"] != draft["target_hidden_size"]:
        raise OverlayError(
            f"--hidden-size {draft['hidden_size']}: the target's hidden size is {draft['target_hidden_size']}, and a "
            "speculators draft must have the same; export with --format vllm"
        )
    if draft["norm_before_fc"] and draft["fc_norm"]:
        raise OverlayError(
            "--norm-before-fc and --fc-norm: a speculators draft has one of them at most; export with --format vllm"
        )


def _speculators_config(plain: dict[str, Any], facts: dict[str, Any]) -> dict[str, Any]:
    """`vllm_overlay` is in the layer's config too: of the whole file, that is what vLLM keeps."""
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


def _architectures(target: Path) -> list[str]:
    """The target's, or none where its folder is not here any more, as speculators writes it then."""
    if not (target / "config.json").is_file():
        return []
    return list(read_config(target / "config.json").get("architectures") or [])
