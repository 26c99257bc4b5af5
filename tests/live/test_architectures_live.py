"""Kinds of decoder layers that differ, each a tiny random checkpoint through the real engine, in one process.

All architectures of a release are tools/architectures.py's; these are those by which the kinds would be missed first.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from packaging.specifiers import SpecifierSet
from vllm.version import __version__

from tests.live.runs import run_python

pytestmark = pytest.mark.live

RUN = Path(__file__).resolve().parents[2] / "tools" / "architecture_run.py"

# What each adds to a Llama.
KINDS = {
    "GPT2LMHeadModel": "one tensor by position, learned positions",
    "Gemma2ForCausalLM": "scaled embeddings, norms behind the sub-layers",
    "CohereForCausalLM": "takes and returns a residual that no layer looks at",
    "FalconForCausalLM": "attention and MLP in parallel",
    "DeepseekV2ForCausalLM": "latent attention, experts behind a dense layer, llama_4_scaling",
    "FalconH1ForCausalLM": "attention and Mamba in one layer, called by keyword; its class is no ...Layer",
    "Mamba2ForCausalLM": "no attention",
    "ChatGLMModel": "a stack that is called encoder",
    "Idefics3ForConditionalGeneration": "the text model of a model with vision",
    "KimiK25ForConditionalGeneration": "a wrapper; vLLM on a CPU does not survive its import of numba",
}
# transformers has no class to compare with.
CONSISTENT = ("ChatGLMModel",)
# Releases that die of one on a CPU, without us too (seen: 0.11.1, 0.16.0, 0.24.0): of a Mamba layer, of a processor of
# images; or of experts where there is no AVX-512, which ask for vLLM's configuration in mid-forward.
NOT_ON_A_CPU = {
    "FalconH1ForCausalLM": SpecifierSet("<0.25"),
    "Mamba2ForCausalLM": SpecifierSet("<0.25"),
    "KimiK25ForConditionalGeneration": SpecifierSet("<0.25"),
    "DeepseekV2ForCausalLM": SpecifierSet("==0.24.*"),
}


@pytest.fixture(scope="module")
def findings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("architectures")
    environment = {
        "VLLM_OVERLAY": "1",
        "VLLM_OVERLAY_CAPTURE": str(folder / "store"),
        "VLLM_OVERLAY_LAYERS": "all",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "WARNING",
        # vLLM 0.16 has no latent attention on a CPU.
        "VLLM_MLA_DISABLE": "1",
        # Eager or not, vLLM 0.11 compiles Gemma's norm on a CPU, for each shape anew: minutes.
        "TORCH_COMPILE_DISABLE": "1",
    }
    done = run_python([str(RUN), str(folder / "models"), *KINDS], environment)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {row["architecture"]: row for row in rows}


@pytest.mark.parametrize("architecture", KINDS)
def test_every_layer_is_captured_and_right(architecture: str, findings: dict[str, dict[str, Any]]) -> None:
    """CASES 13 and 17."""
    if architecture in NOT_ON_A_CPU and __version__ in NOT_ON_A_CPU[architecture]:
        pytest.skip(f"vLLM {__version__} does not run it on a CPU")
    found = findings[architecture]
    assert found["verdict"] == ("consistent" if architecture in CONSISTENT else "equal"), found
    assert found["rows"] == 5 + 19 + 33 + 3 * 5
    assert found["head"] <= 1e-5
