"""What the GPU tests share: who holds the GPUs before a test, and where its figures go.

And a random target of the shapes of Llama-3.1-8B with a store of random states: what training reads of them.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import save_file

from vllm_overlay.store import PendingRecord, StoreMeta, StoreWriter

SHAPES = Path(__file__).with_name("llama_8b")
RECORDS, LENGTH = 96, 1024
LAYER_IDS = (2, 16, 29, 32)
# Of an engine. Told how much memory its KV cache takes, vLLM does not measure what is free while it starts: it fails
# where a neighbour on the same GPU, such as the engine before it, gives some back meanwhile ("Error in memory
# profiling", 0.24.0).
MEMORY = {"gpu_memory_utilization": 0.1, "kv_cache_memory_bytes": 2 << 30}
# A folder in which each test leaves its figures, a line in `figures.jsonl`, as soon as it has them.
RESULTS = "GPU_RESULTS"

Report = Callable[[str, dict[str, Any]], None]


@pytest.fixture(scope="session")
def report() -> Report:
    """Print a test's figures, and keep them where RESULTS says: a run that is cut off shows what it had."""
    started = time.monotonic()

    def write(name: str, figures: dict[str, Any]) -> None:
        line = json.dumps({"name": name, "at_s": round(time.monotonic() - started, 1), **figures})
        print(f"\n{line}", flush=True)
        if RESULTS in os.environ:
            with (Path(os.environ[RESULTS]) / "figures.jsonl").open("a") as file:
                file.write(line + "\n")

    names = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    versions = {name: find_version(name) for name in ("vllm", "torch", "transformers")}
    command = shlex.join(["pytest", *sys.argv[1:]])
    write("session", {"date": time.strftime("%Y-%m-%d"), "command": command, "devices": names, "versions": versions})
    return write


def find_version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "not installed"


@pytest.fixture(autouse=True)
def holders_of_the_gpus() -> None:
    """Printed before each test: an engine that was left over, or a neighbour's, is named in a failure's report."""
    if torch.cuda.is_available():
        print(f"\n{describe_holders()}", flush=True)


def describe_holders() -> str:
    memory = ask_nvidia("--query-gpu=index,memory.used,memory.total")
    holders = ask_nvidia("--query-compute-apps=pid,used_memory")
    return "\n".join([*(f"GPU {line}" for line in memory), *(f"{line}: {name_process(line)}" for line in holders)])


def ask_nvidia(query: str) -> list[str]:
    words = ["nvidia-smi", "--format=csv,noheader", query]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout.splitlines()


def name_process(line: str) -> str:
    """The command of the process that a line begins with."""
    try:
        return " ".join(psutil.Process(int(line.split(",")[0])).cmdline())[:200]
    except psutil.Error:
        return "no process of this machine"


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def store(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_states(tmp_path_factory.mktemp("store") / "store", model)


def write_model(folder: Path) -> Path:
    """Its two ends and its last layer, into a folder that is there."""
    shutil.copy(SHAPES / "config.json", folder)
    facts = json.loads((folder / "config.json").read_text())
    hidden, wide, layer = facts["hidden_size"], facts["intermediate_size"], facts["num_hidden_layers"] - 1
    kv = facts["num_key_value_heads"] * facts["head_dim"]
    shapes = {
        "model.embed_tokens": (facts["vocab_size"], hidden),
        "lm_head": (facts["vocab_size"], hidden),
        f"model.layers.{layer}.self_attn.q_proj": (hidden, hidden),
        f"model.layers.{layer}.self_attn.k_proj": (kv, hidden),
        f"model.layers.{layer}.self_attn.v_proj": (kv, hidden),
        f"model.layers.{layer}.self_attn.o_proj": (hidden, hidden),
        f"model.layers.{layer}.mlp.gate_proj": (wide, hidden),
        f"model.layers.{layer}.mlp.up_proj": (wide, hidden),
        f"model.layers.{layer}.mlp.down_proj": (hidden, wide),
    }
    generator = torch.Generator("cuda").manual_seed(0)
    tensors = {
        f"{name}.weight": (0.02 * torch.randn(shape, generator=generator, device="cuda")).bfloat16().cpu()
        for name, shape in shapes.items()
    }
    norms = ["model.norm", *(f"model.layers.{layer}.{name}_layernorm" for name in ("input", "post_attention"))]
    tensors |= {f"{name}.weight": torch.ones(hidden, dtype=torch.bfloat16) for name in norms}
    save_file(tensors, str(folder / "model.safetensors"))
    torch.cuda.empty_cache()  # other processes train and serve on this GPU
    return folder


def write_states(path: Path, model: Path) -> Path:
    """A store of random states; a few hundred tokens, so that the draft has something to learn."""
    facts = json.loads((model / "config.json").read_text())
    hidden, layers = facts["hidden_size"], facts["num_hidden_layers"]
    meta = StoreMeta(LAYER_IDS, hidden, "bfloat16", layers, "random", "random", "0.0.0", "V2")
    writer = StoreWriter.open(path, meta)
    generator = torch.Generator("cuda").manual_seed(1)
    for number in range(RECORDS):
        length = LENGTH - number % 7 * 32  # unequal, so that a mean of means would show
        states = torch.randn(length, len(LAYER_IDS), hidden, generator=generator, device="cuda").bfloat16().cpu()
        first = writer.append(states)
        token_ids = torch.randint(0, 500, (length,), generator=generator, device="cuda").cpu().numpy()
        rows = np.arange(first, first + length, dtype=np.int64)
        writer.commit([PendingRecord(f"r{number}", token_ids, rows, 64, True, "length", None, None)])
    writer.close()
    return path
