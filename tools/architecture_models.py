"""Tiny checkpoints of any architecture: its own configuration class, made small, and random weights.

Three ways, the first that there is: a class of transformers, whose weights are saved and whose forward is the
reference; a configuration class of vLLM; or bare fields where neither has one, because the published checkpoints bring
code of their own. The last two have weights that vLLM makes itself (`load_format="dummy"`).
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from architecture_fields import ALIASES, BARE, BARE_FIELDS, CONFIGURED_BY_VLLM, EXTRA, RENAMED, SIZES

VOCABULARY = 128
SPREAD = 0.08

_FLOAT32 = {"dtype": "float32", "torch_dtype": "float32"}

# The configuration of a model that neither transformers nor vLLM has a class for takes whatever fields it is given.
BARE_CONFIGURATION = """
from transformers import PretrainedConfig


class TinyConfig(PretrainedConfig):
    model_type = "{model_type}"
"""


@dataclass(frozen=True)
class Checkpoint:
    """A folder with a config.json. `reference` is the transformers class of its weights, None if vLLM makes them.

    `config` is the name of the configuration's class.
    """

    folder: Path
    source: Literal["transformers", "vllm", "fields"]
    config: str
    reference: type | None


class NoRecipe(Exception):
    """Nothing says how this architecture is configured."""


def write_checkpoint(architecture: str, folder: Path, seed: int = 0, *, weights: bool = True) -> Checkpoint:
    """A random checkpoint in `folder`; without `weights`, vLLM makes them even where transformers could.

    Errors: NoRecipe, and what a configuration class raises.
    """
    import transformers

    name = ALIASES.get(architecture, architecture)
    folder.mkdir(parents=True, exist_ok=True)
    model_class = getattr(transformers, name, None)
    if architecture in CONFIGURED_BY_VLLM:
        model_class = None
    if model_class is not None and getattr(model_class, "config_class", None) is not None:
        config = shrink(model_class.config_class, EXTRA.get(architecture, {}))
        if weights and _write_weights(model_class, config, folder, seed):
            _rename_weights(folder / "model.safetensors", RENAMED.get(architecture, {}))
            _write_config(folder, architecture, {})
            return Checkpoint(folder, "transformers", type(config).__name__, model_class)
        config.save_pretrained(folder)
        _write_config(folder, architecture, _FLOAT32)
        return Checkpoint(folder, "vllm", type(config).__name__, None)
    config_class = _find_vllm_config(architecture)
    if config_class is not None and architecture not in BARE:
        config = shrink(config_class, EXTRA.get(architecture, {}))
        config.save_pretrained(folder)
        _write_config(folder, architecture, _FLOAT32)
        return Checkpoint(folder, "vllm", config_class.__name__, None)
    if architecture not in BARE:
        raise NoRecipe(f"neither transformers {transformers.__version__} nor vLLM has a configuration for it")
    fields = {**BARE_FIELDS, **BARE[architecture]}
    (folder / "configuration_tiny.py").write_text(BARE_CONFIGURATION.format(model_type=fields["model_type"]))
    fields["auto_map"] = {"AutoConfig": "configuration_tiny.TinyConfig"}
    (folder / "config.json").write_text(json.dumps({**fields, "architectures": [architecture]}, indent=2))
    return Checkpoint(folder, "fields", f"fields of {fields['model_type']}", None)


def shrink(config_class: Any, extra: Mapping[str, Any]) -> Any:
    """A small configuration of a class: every size that it has made small, every other field as the class has it."""
    whole = config_class()
    fields = {name: value for name, value in SIZES.items() if _has(whole, name)}
    if _has(whole, "kv_lora_rank"):
        # vLLM's rotary embeddings on a CPU take the heads of a query of latent attention for tokens.
        fields |= {name: 1 for name in ("num_attention_heads", "num_key_value_heads") if name in fields}
        # transformers' name for the width of what is rotated.
        fields |= {name: fields["qk_rope_head_dim"] for name in ("head_dim",) if name in fields}
    if "layers_block_type" not in extra:
        fields |= _shrink_pattern(whole, "layer_types", int(fields.get("num_hidden_layers", 4)))
    for name in ("text_config", "vision_config", "audio_config"):
        part = getattr(whole, name, None)
        if part is None or isinstance(part, Mapping):
            continue
        # As a plain object: some classes take nothing else.
        small = shrink(type(part), extra.get(name, {})).to_dict()
        fields[name] = {**small, "model_type": type(part).model_type}
    fields |= {name: value for name, value in extra.items() if not isinstance(value, Mapping) or name not in fields}
    return config_class(**_as_this_transformers_has_it(whole, fields))


def _as_this_transformers_has_it(whole: Any, fields: dict[str, Any]) -> dict[str, Any]:
    """transformers 4 has `rope_scaling` for `rope_parameters`, and no width of its own in DBRX's experts."""
    given = dict(fields)
    if "rope_parameters" in given and not hasattr(whole, "rope_parameters"):
        rope = given.pop("rope_parameters")
        given |= {"rope_scaling": {**rope, "type": "default", "rope_type": "default"}, "rope_theta": rope["rope_theta"]}
    part = getattr(whole, "ffn_config", None)
    if part is not None and "hidden_size" in given.get("ffn_config", {}) and not hasattr(part, "hidden_size"):
        given["ffn_config"] = {name: value for name, value in given["ffn_config"].items() if name != "hidden_size"}
    return given


def _has(config: Any, name: str) -> bool:
    """Whether the class has the field and does not leave it out."""
    fields = config.to_dict()
    written_as = getattr(type(config), "attribute_map", {}).get(name, name)
    return fields.get(name) is not None or fields.get(written_as) is not None


def _shrink_pattern(whole: Any, name: str, layers: int) -> dict[str, Any]:
    """Each kind of layer that the pattern has, in the order of their first place, over again."""
    pattern = getattr(whole, name, None)
    written_as = getattr(type(whole), "attribute_map", {}).get(name, name)
    is_derived = isinstance(getattr(type(whole), written_as, None), property)
    if is_derived or not pattern or not isinstance(pattern, list | tuple):
        return {}
    kinds = list(dict.fromkeys(pattern))
    count = max(layers, len(kinds))
    return {name: (kinds * count)[:count], "num_hidden_layers": count}


def _write_weights(model_class: Any, config: Any, folder: Path, seed: int) -> bool:
    """Random weights; norms that are not the identity, so that a state taken behind one is seen to be another.

    They are numbers of bfloat16, so that an engine of 16 bits has the weights that transformers has.

    False where transformers cannot save them: before 5 it refuses Zamba2's, which several layers share.
    """
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(copy.deepcopy(config)).float()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.ndim >= 2:
                    parameter.copy_(torch.randn_like(parameter) * SPREAD)
                elif "norm" in name or "ln_" in name or name.endswith("bias"):
                    parameter.add_(torch.randn_like(parameter) * 0.1)
                parameter.copy_(parameter.bfloat16())
    try:
        model.save_pretrained(folder)
    except RuntimeError as error:
        if "shared tensors" not in str(error):
            raise
        return False
    return True


def _rename_weights(file: Path, names: Mapping[str, str]) -> None:
    """Give the tensors whose names begin with a key of `names` the value for it."""
    from safetensors.torch import load_file, save_file

    if not names:
        return
    renamed = {}
    for name, tensor in load_file(file).items():
        begin = next((begin for begin in names if name.startswith(begin)), "")
        renamed[f"{names.get(begin, '')}{name.removeprefix(begin)}"] = tensor
    save_file(renamed, file, metadata={"format": "pt"})


def _write_config(folder: Path, architecture: str, more: Mapping[str, Any]) -> None:
    file = folder / "config.json"
    fields = json.loads(file.read_text()) | more | {"architectures": [architecture]}
    file.write_text(json.dumps(fields, indent=2))


def _find_vllm_config(architecture: str) -> Any:
    """vLLM's own configuration class of an architecture, by its name or by the model type that EXTRA names."""
    from vllm.transformers_utils import config as vllm_config

    registry = vllm_config._CONFIG_REGISTRY
    by_name = {str(name): model_type for model_type, name in dict.items(registry)}
    wanted = EXTRA.get(architecture, {}).get("model_type")
    model_type = wanted or by_name.get(f"{architecture.removesuffix('ForCausalLM')}Config")
    if model_type not in registry:
        return None
    # Its `get` gives the name of the class, and only this the class.
    return registry[model_type]
