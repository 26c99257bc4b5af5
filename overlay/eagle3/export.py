"""A trained draft as a checkpoint: a plain Llama or Qwen3 config.json, as vLLM loads it, or speculators' form."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from vllm_overlay.eagle3.draft import DraftConfig
from vllm_overlay.eagle3.run_folder import RunFolder
from vllm_overlay.eagle3.speculators_format import convert_to_speculators
from vllm_overlay.eagle3.target import sample_embeddings
from vllm_overlay.eagle3.vocabulary import DraftVocabulary
from vllm_overlay.errors import OverlayError

LAYER_ID_CONVENTION = (
    "id k is the residual stream after k decoder layers; 0 is the embedding output; N is before the final norm"
)
LATER_NORMS = ("norm_before_fc", "fc_norm", "norm_output")  # absent where not used: older releases know none of them
ARCHITECTURES = {"llama": "LlamaForCausalLMEagle3", "qwen3": "Eagle3Qwen3ForCausalLM"}  # by model_type
FORMATS = ("vllm", "speculators")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def export_run(
    run: str | Path, output: str | Path, *, format: str = "vllm", checkpoint: str = "best", dtype: str = "auto"
) -> Path:
    """Write the draft of a run to `output`, which must not exist or be empty; it appears whole or not at all.

    format: "vllm", a plain config.json, or "speculators". checkpoint: "best", "last", "untrained" or a step.
    dtype: of the file's weights; "auto" is the target's.
    Raises OverlayError: no such run or checkpoint, an output folder in use, a draft that the format cannot hold.
    """
    if format not in FORMATS:
        raise OverlayError(f"format {format!r}: expected {' or '.join(FORMATS)}")
    folder, output = RunFolder.open(run), Path(output)
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise OverlayError(f"{output}: is not empty; choose another folder")
    source = folder.find_checkpoint(checkpoint)
    facts = folder.config
    dtype = facts["target"]["dtype"] if dtype == "auto" else dtype
    tensors = {name: tensor.to(DTYPES[dtype]) for name, tensor in load_file(str(source / "draft.safetensors")).items()}
    vocabulary = DraftVocabulary.load(folder.path / "vocabulary.safetensors")
    if not vocabulary.is_full:  # a full vocabulary maps to itself, and vLLM has no place for a map then
        tensors |= {"d2t": vocabulary.d2t, "t2d": vocabulary.t2d}
    config = vllm_config(facts, dtype, step=json.loads((source / "state.json").read_text())["step"])
    if format == "speculators":
        config, tensors = convert_to_speculators(config, tensors, facts)

    output.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{output.name}-", dir=output.parent))
    try:
        temporary.chmod(0o755)
        save_file(tensors, str(temporary / "model.safetensors"), metadata={"format": "pt"})
        (temporary / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        temporary.replace(output)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return output


def vllm_config(facts: dict[str, Any], dtype: str, step: int) -> dict[str, Any]:
    """config.json from the facts of a run. Transformers 4 reads rope_theta, 5 reads rope_parameters."""
    draft, target = facts["draft"], facts["target"]
    style = draft.get("style", "llama")  # older runs know one only
    own_size = (
        {"target_hidden_size": draft["target_hidden_size"]}
        if draft["hidden_size"] != draft["target_hidden_size"]
        else {}
    )
    return {
        "architectures": [ARCHITECTURES[style]],
        "model_type": style,
        "hidden_size": draft["hidden_size"],
        **own_size,
        "intermediate_size": draft["intermediate_size"],
        "num_hidden_layers": 1,
        "num_attention_heads": draft["num_attention_heads"],
        "num_key_value_heads": draft["num_key_value_heads"],
        "head_dim": draft["head_dim"],
        "hidden_act": "silu",
        "vocab_size": draft["vocab_size"],
        "draft_vocab_size": draft["draft_vocab_size"],
        "rms_norm_eps": draft["rms_norm_eps"],
        "rope_theta": draft["rope_theta"],
        "rope_parameters": {"rope_type": "default", "rope_theta": draft["rope_theta"]},
        "max_position_embeddings": draft["max_position_embeddings"],
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": target["bos_token_id"],
        "norm_before_residual": draft["norm_before_residual"],
        **{name: True for name in LATER_NORMS if draft[name]},
        "eagle_aux_hidden_state_layer_ids": draft["layer_ids"],
        "torch_dtype": dtype,
        "vllm_overlay": {
            "target": target["name"],
            "target_fingerprint": facts["data"]["model_fingerprint"],
            "target_layers": target["num_hidden_layers"],
            "target_hidden_size": draft["target_hidden_size"],
            "target_vocab_size": draft["vocab_size"],
            "target_embedding_sample": _sample_embeddings(facts),
            "layer_ids": draft["layer_ids"],
            "layer_id_convention": LAYER_ID_CONVENTION,
            "trained_steps": step,
            "made_with": facts["made_with"],
        },
    }


def _sample_embeddings(facts: dict[str, Any]) -> list[float]:
    """Of the target that was trained on; empty where its folder is not here any more."""
    draft = facts["draft"]
    return list(sample_embeddings(Path(facts["target"]["path"]), draft["vocab_size"], draft["target_hidden_size"]))


def read_draft_config(config: dict[str, Any]) -> DraftConfig:
    """The shapes of a draft from its exported config.json."""
    return DraftConfig(
        hidden_size=config["hidden_size"],
        target_hidden_size=config.get("target_hidden_size", config["hidden_size"]),
        num_attention_heads=config["num_attention_heads"],
        num_key_value_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        intermediate_size=config["intermediate_size"],
        vocab_size=config["vocab_size"],
        draft_vocab_size=config["draft_vocab_size"],
        rms_norm_eps=config["rms_norm_eps"],
        rope_theta=config["rope_theta"],
        max_position_embeddings=config["max_position_embeddings"],
        norm_before_residual=config.get("norm_before_residual", False),
        **{name: config.get(name, False) for name in LATER_NORMS},
        style=config["model_type"],
        layer_ids=tuple(config["eagle_aux_hidden_state_layer_ids"]),
    )
