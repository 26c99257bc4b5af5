"""Loads exported drafts as vLLM does before it serves them, and writes what its draft class then holds.

usage: load_drafts.py MODEL DRAFT...; writes DRAFT/loaded.safetensors: every parameter by its name in vLLM's class.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from safetensors.torch import save_file


def load(model: str, draft: Path) -> None:
    from vllm.config import set_current_vllm_config
    from vllm.distributed import ensure_model_parallel_initialized
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model_loader
    from vllm.model_executor.model_loader.utils import initialize_model

    speculative = {"method": "eagle3", "model": str(draft), "num_speculative_tokens": 3}
    options = {"dtype": "float32", "enforce_eager": True, "max_model_len": 256}
    config = EngineArgs(model, speculative_config=speculative, **options).create_engine_config()
    with set_current_vllm_config(config):
        ensure_model_parallel_initialized(1, 1)
        of_draft = config.speculative_config.draft_model_config
        loaded = initialize_model(vllm_config=config, model_config=of_draft)
        # Without what vLLM does next: on a CPU it packs the weights, and the parameters are empty.
        get_model_loader(config.load_config).load_weights(loaded, of_draft)
    parameters = {name: parameter.detach().clone() for name, parameter in loaded.named_parameters()}
    save_file(parameters, str(draft / "loaded.safetensors"))


if __name__ == "__main__":
    from vllm.distributed import init_distributed_environment

    with tempfile.TemporaryDirectory() as folder:
        init_distributed_environment(1, 0, f"file://{folder}/store", 0, backend="gloo")
        for draft in sys.argv[2:]:
            load(sys.argv[1], Path(draft))
