"""The three tensors of the target that training needs: final norm, output head, embeddings. Never the whole model."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from vllm_overlay.errors import OverlayError

# Final norms that are not `x / rms(x) * weight`, by model_type. The targets of training need the target's own norm, and
# vLLM's draft class has the Llama kind only.
OTHER_FINAL_NORM = {
    **dict.fromkeys(
        ["gemma", "gemma2", "gemma3", "gemma3_text", "gemma3n", "gemma3n_text", "recurrent_gemma", "paligemma"],
        "its RMSNorm multiplies by (1 + weight)",
    ),
    **dict.fromkeys(["qwen3_next", "qwen3_5", "qwen3_5_text"], "its RMSNorm multiplies by (1 + weight)"),
    **dict.fromkeys(
        [
            "gpt2",
            "gptj",
            "gpt_neo",
            "gpt_neox",
            "gpt_bigcode",
            "opt",
            "bloom",
            "falcon",
            "mpt",
            "phi",
            "starcoder2",
            "dbrx",
        ],
        "its final norm is a LayerNorm",
    ),
    **dict.fromkeys(["stablelm", "persimmon", "codegen"], "its final norm is a LayerNorm"),
    **dict.fromkeys(["cohere", "cohere2"], "its final norm is a LayerNorm without bias, and its logits are scaled"),
    "olmo": "its final norm is a LayerNorm without weight",
    "nemotron": "its final norm is a LayerNorm with (1 + weight)",
}
NUM_SAMPLES = 32
LOGIT_CHANGES = ("logit_scale", "logits_scaling", "final_logit_softcapping", "dim_model_base")


@dataclass(frozen=True)
class TargetConfig:
    """What config.json says of the language model (of `text_config` where the file nests it)."""

    model_type: str
    hidden_size: int
    num_hidden_layers: int
    vocab_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    bos_token_id: int | None
    special_token_ids: tuple[int, ...]


@dataclass(frozen=True)
class Target:
    """The target's config and the tensors at its two ends, in the checkpoint's own dtype, on the CPU.

    final_norm: [hidden]; lm_head and embed_tokens: [vocab, hidden]. A tied head is the embeddings.
    """

    path: Path
    config: TargetConfig
    final_norm: torch.Tensor
    lm_head: torch.Tensor
    embed_tokens: torch.Tensor

    def logits(self, states: torch.Tensor, head: torch.Tensor | None = None) -> torch.Tensor:
        """Logits of states `[rows, hidden]` taken BEFORE the final norm (layer id N); the norm is applied here, once.

        `head` replaces the whole head, for example by its rows of the draft vocabulary.
        Source: LlamaModel.norm and LlamaForCausalLM.lm_head in transformers.
        """
        head = self.lm_head if head is None else head
        normed = rms_norm(states.float(), self.final_norm.to(states.device, torch.float32), self.config.rms_norm_eps)
        return torch.nn.functional.linear(normed, head.to(states.device, torch.float32))


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`x / sqrt(mean(x^2) + eps) * weight` over the last dimension (Zhang and Sennrich 2019, as Llama uses it)."""
    return torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, eps)


def widen(x: torch.Tensor) -> torch.Tensor:
    """16 bits to float32; float32 and float64 as they are."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def load_target(path: str | Path) -> Target:
    """Read config, final norm, head and embeddings of a local checkpoint folder (one file or an index, tied or untied).

    Raises OverlayError: no such folder or files, a final norm that is not Llama's, changed logits, quantised ends.
    """
    path = Path(path)
    config, tied = read_target_config(path)
    files = _tensor_files(path)
    embed_name = _shortest(files, "embed_tokens.weight", path)
    prefix = embed_name.removesuffix("embed_tokens.weight")
    norm_name = f"{prefix}norm.weight"
    if norm_name not in files:
        raise OverlayError(
            f"{path}: no tensor {norm_name} beside {embed_name}; only Llama-like checkpoints can be trained for"
        )
    if f"{prefix}norm.bias" in files:
        raise OverlayError(
            f"{path}: the final norm has a bias, so it is a LayerNorm; only RMSNorm targets are supported"
        )

    embed_tokens = _read(files, embed_name)[: config.vocab_size]
    has_own_head = not tied and any(name.endswith("lm_head.weight") for name in files)
    if not tied and not has_own_head:
        raise OverlayError(f"{path}: no lm_head.weight, and config.json does not say tie_word_embeddings")
    lm_head = (
        _read(files, _shortest(files, "lm_head.weight", path))[: config.vocab_size] if has_own_head else embed_tokens
    )
    for name, tensor in (("lm_head", lm_head), ("embed_tokens", embed_tokens)):
        if tensor.shape != (config.vocab_size, config.hidden_size) or not tensor.is_floating_point():
            raise OverlayError(
                f"{path}: {name} is {tensor.dtype} {tuple(tensor.shape)}, expected floating point "
                f"({config.vocab_size}, {config.hidden_size}); a quantised head cannot be trained against"
            )
    return Target(path, config, _read(files, norm_name), lm_head, embed_tokens)


def load_layer(path: str | Path, layer: int) -> dict[str, torch.Tensor]:
    """The tensors of one decoder layer, 0-based, by their names inside the layer ("self_attn.q_proj.weight", ...)."""
    files = _tensor_files(Path(path))
    prefix = (
        _shortest(files, "embed_tokens.weight", Path(path)).removesuffix("embed_tokens.weight") + f"layers.{layer}."
    )
    return {name.removeprefix(prefix): _read(files, name) for name in files if name.startswith(prefix)}


def sample_embeddings(path: Path, vocab_size: int, hidden_size: int) -> tuple[float, ...]:
    """32 values at even places of a checkpoint folder's embeddings, which quantised copies leave as they are.

    Empty where there are none to read: no safetensors, another name or shape, not floating point.
    """
    files = _tensor_files(path) if any(path.glob("*.safetensors")) else {}
    names = _named(files, "embed_tokens.weight")
    if not names:
        return ()
    name = min(names, key=len)
    with safe_open(str(files[name]), framework="pt") as tensors:
        rows = tensors.get_slice(name)
        shape = rows.get_shape()
        if len(shape) != 2 or shape[0] < vocab_size or shape[1] != hidden_size:
            return ()
        values = [rows[_place(i, vocab_size) : _place(i, vocab_size) + 1] for i in range(NUM_SAMPLES)]  # [1, hidden]
    if not values[0].is_floating_point():
        return ()
    return tuple(float(f"{float(row[0, _place(i, hidden_size)]):.4g}") for i, row in enumerate(values))


def _place(sample: int, size: int) -> int:
    return sample * (size - 1) // (NUM_SAMPLES - 1)


def read_target_config(path: Path) -> tuple[TargetConfig, bool]:
    """config.json as facts, and whether the head is tied. Raises OverlayError as `load_target` does."""
    if not (path / "config.json").is_file():
        raise OverlayError(f"{path}: no config.json; --model takes the local folder of a checkpoint")
    outer: dict[str, Any] = json.loads((path / "config.json").read_text())
    inner: dict[str, Any] = outer.get("text_config") or outer
    model_type = str(inner.get("model_type", outer.get("model_type", "unknown")))
    if model_type in OTHER_FINAL_NORM:
        raise OverlayError(f"{path}: model_type {model_type!r} cannot be trained for: {OTHER_FINAL_NORM[model_type]}")
    changed = [key for key in LOGIT_CHANGES if inner.get(key) not in (None, 1, 1.0)]
    if changed:
        raise OverlayError(
            f"{path}: model_type {model_type!r} cannot be trained for: its logits are changed by {changed[0]}"
        )
    if "rms_norm_eps" not in inner:
        raise OverlayError(f"{path}: model_type {model_type!r} has no rms_norm_eps; only RMSNorm targets are supported")

    heads = int(inner["num_attention_heads"])
    rope = inner.get("rope_parameters") or {}
    config = TargetConfig(
        model_type=model_type,
        hidden_size=int(inner["hidden_size"]),
        num_hidden_layers=int(inner["num_hidden_layers"]),
        vocab_size=int(inner["vocab_size"]),
        num_attention_heads=heads,
        num_key_value_heads=int(inner.get("num_key_value_heads") or heads),
        head_dim=int(inner.get("head_dim") or inner["hidden_size"] // heads),
        intermediate_size=int(inner["intermediate_size"]),
        rms_norm_eps=float(inner["rms_norm_eps"]),
        rope_theta=float(inner.get("rope_theta") or rope.get("rope_theta") or 10000.0),
        max_position_embeddings=int(inner.get("max_position_embeddings") or 2048),
        bos_token_id=inner.get("bos_token_id") if isinstance(inner.get("bos_token_id"), int) else None,
        special_token_ids=_special_token_ids(path, inner),
    )
    return config, bool(inner.get("tie_word_embeddings", outer.get("tie_word_embeddings", False)))


def _special_token_ids(path: Path, config: dict[str, Any]) -> tuple[int, ...]:
    """Begin, end and padding ids of the configs, and the tokenizer's special tokens where tokenizer.json is present."""
    generation = path / "generation_config.json"
    sources = [config, json.loads(generation.read_text()) if generation.is_file() else {}]
    ids: set[int] = set()
    for source in sources:
        for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
            value = source.get(key)
            ids.update(value if isinstance(value, list) else [] if value is None else [value])
    tokenizer = path / "tokenizer.json"
    if tokenizer.is_file():
        ids.update(t["id"] for t in json.loads(tokenizer.read_text()).get("added_tokens", []) if t.get("special"))
    return tuple(sorted(ids))


def _tensor_files(path: Path) -> dict[str, Path]:
    """Which file holds which tensor."""
    index = path / "model.safetensors.index.json"
    if index.is_file():
        return {name: path / file for name, file in json.loads(index.read_text())["weight_map"].items()}
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise OverlayError(f"{path}: no *.safetensors; convert the checkpoint to safetensors first")
    names: dict[str, Path] = {}
    for file in files:
        with safe_open(str(file), framework="pt") as tensors:
            names.update(dict.fromkeys(tensors.keys(), file))
    return names


def _shortest(files: dict[str, Path], ending: str, path: Path) -> str:
    """The outermost tensor of that name: multi-token-prediction layers carry copies deeper down."""
    names = _named(files, ending)
    if not names:
        raise OverlayError(f"{path}: no tensor named *{ending}")
    return min(names, key=len)


def _named(files: dict[str, Path], ending: str) -> list[str]:
    return [name for name in files if name == ending or name.endswith(f".{ending}")]


def _read(files: dict[str, Path], name: str) -> torch.Tensor:
    with safe_open(str(files[name]), framework="pt") as tensors:
        tensor: torch.Tensor = tensors.get_tensor(name)
    return tensor
