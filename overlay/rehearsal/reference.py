"""transformers' own model of a small configuration: random weights to load, and its states to compare with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

# A row's distance from transformers', over its own size, up to which they are called equal.
TOLERANCE = 1e-4

_SPREAD = 0.08
_TOWERS = ("vision", "visual", "audio", "encoder")


def write_weights(model_folder: Path) -> Any | None:
    """transformers' model in float32 with random weights, saved beside the config.json, which stays as it is.

    None where this transformers has no class for the architecture. Errors: what transformers raises.
    """
    import transformers

    file = model_folder / "config.json"
    text = file.read_text(encoding="utf-8")
    model_class = getattr(transformers, json.loads(text)["architectures"][0], None)
    if model_class is None or getattr(model_class, "config_class", None) is None:
        return None
    config = model_class.config_class.from_pretrained(str(model_folder))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = model_class._from_config(config, attn_implementation="eager").float().eval()
        _randomise(model)
    model.save_pretrained(str(model_folder))
    file.write_text(text, encoding="utf-8")
    return model


def _randomise(model: torch.nn.Module) -> None:
    """Norms that are not the identity too, so that a state taken behind one is seen to be another."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2:
                parameter.copy_(torch.randn_like(parameter) * _SPREAD)
            elif "norm" in name or "ln_" in name or name.endswith("bias"):
                parameter.add_(torch.randn_like(parameter) * 0.1)


@torch.no_grad()
def compute_states(model: Any, token_ids: torch.Tensor, layers: int) -> torch.Tensor:
    """`[tokens, N + 1, hidden]` of transformers' forward, the last before the final norm.

    Errors: ValueError when its states are not one more than the layers.
    """
    last: list[Any] = []
    stacks = [
        module
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.ModuleList)
        and len(module) == layers
        and not any(word in name for word in _TOWERS)
        and name.count(".") <= 3
    ]
    if len(stacks) != 1:
        raise ValueError(f"{len(stacks)} lists of {layers} layers in {type(model).__name__}")
    handle = stacks[0][-1].register_forward_hook(lambda module, args, output: last.append(output))
    try:
        output = model(input_ids=token_ids[None], output_hidden_states=True, use_cache=False)
    finally:
        handle.remove()
    if len(output.hidden_states) != layers + 1:
        raise ValueError(f"{len(output.hidden_states)} hidden states of {layers} layers")
    end = last[-1][0] if isinstance(last[-1], tuple) else last[-1]
    states = [state[0] for state in output.hidden_states[:layers]]
    return torch.stack([*states, end.reshape(states[0].shape)], dim=1)
