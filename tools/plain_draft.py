"""A draft that speculators 0.9 trained, in the plain form, whose acceptance `vllm-overlay evaluate` measures by its
chain, too: python tools/plain_draft.py FOLDER OUTPUT --model TARGET
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from training_sides import describe_draft, write_checkpoint
from transformers import AutoConfig

from vllm_overlay.eagle3.draft import DraftConfig
from vllm_overlay.eagle3.export import LATER_NORMS, vllm_config
from vllm_overlay.eagle3.target import Target, load_target
from vllm_overlay.errors import OverlayError


def read_shape(config: dict[str, Any]) -> DraftConfig:
    """The shapes in speculators' config.json, which leaves out what is the default of the layer's own class.

    Raises OverlayError: a draft of several layers.
    """
    written = config["transformer_layer_config"]
    layer = type(AutoConfig.for_model(written["model_type"])).from_dict(written)
    if layer.num_hidden_layers != 1:
        raise OverlayError(f"a draft of {layer.num_hidden_layers} layers, and the plain form has one")
    return DraftConfig(
        hidden_size=layer.hidden_size,
        target_hidden_size=config.get("target_hidden_size") or layer.hidden_size,
        num_attention_heads=layer.num_attention_heads,
        num_key_value_heads=layer.num_key_value_heads,
        head_dim=layer.head_dim or layer.hidden_size // layer.num_attention_heads,
        intermediate_size=layer.intermediate_size,
        vocab_size=layer.vocab_size,
        draft_vocab_size=config["draft_vocab_size"],
        rms_norm_eps=layer.rms_norm_eps,
        rope_theta=written["rope_parameters"]["rope_theta"],
        max_position_embeddings=layer.max_position_embeddings,
        norm_before_residual=config.get("norm_before_residual", False),
        **{name: config.get(name, False) for name in LATER_NORMS},
        style=written["model_type"],
        layer_ids=tuple(config["eagle_aux_hidden_state_layer_ids"]),
    )


def convert(
    config: dict[str, Any], tensors: dict[str, torch.Tensor], target: Target, model: str
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """config.json and tensors of the plain form, which has no embeddings: they are the target's.

    Raises OverlayError: embeddings of its own, or another shape than the plain form's.
    """
    embeddings = tensors.get("embed_tokens.weight")
    if embeddings is not None and not torch.equal(embeddings, target.embed_tokens.to(embeddings.dtype)):
        raise OverlayError("the draft's embeddings are not the target's, and the plain form has none")
    dtype = str(tensors["fc.weight"].dtype).removeprefix("torch.")
    facts = describe_draft(read_shape(config), target, model)
    return vllm_config(facts, dtype, step=0), {
        name.replace("layers.0.", "midlayer."): tensor
        for name, tensor in tensors.items()
        if name != "embed_tokens.weight"
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="of speculators' config.json and model.safetensors")
    parser.add_argument("output", type=Path, metavar="OUTPUT", help="new")
    parser.add_argument("--model", required=True, metavar="TARGET", help="its checkpoint's folder")
    args = parser.parse_args()
    try:
        config = json.loads((args.folder / "config.json").read_text())
        tensors = load_file(str(args.folder / "model.safetensors"))
        write_checkpoint(args.output, *convert(config, tensors, load_target(args.model), args.model))
    except KeyError as error:
        print(f"{args.folder / 'config.json'}: has no {error.args[0]!r}, which speculators 0.9 writes", file=sys.stderr)
        return 1
    except (OverlayError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
