"""Which runner an engine would take, from what a release's files say."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.check.conftest import LLAMA
from vllm_overlay.check.installation import Installation
from vllm_overlay.check.model import ModelFacts
from vllm_overlay.check.runner import check_runner, choose_runner
from vllm_overlay.source.definitions import Definitions
from vllm_overlay.source.vllm_source import VllmSource

WITH_VARIABLE = {"vllm/envs.py": "VLLM_USE_V2_MODEL_RUNNER: bool | None = None\n"}
ALL = {**WITH_VARIABLE, "vllm/config/vllm.py": "class VllmConfig:\n    def use_v2_model_runner(self): ...\n"}
TABLE = """DEFAULT_V2_MODEL_RUNNER_ARCHITECTURES = frozenset({"Qwen3ForCausalLM"})


class VllmConfig:
    def use_v2_model_runner(self): ...

    def _is_default_v2_model_runner_model(self):
        return REST

    @property
    def next(self): ...
"""
SOME = {**WITH_VARIABLE, "vllm/config/vllm.py": TABLE.replace("REST", "False")}
DENSE = {**WITH_VARIABLE, "vllm/config/vllm.py": TABLE.replace("REST", "not self.model_config.is_moe")}


def make(files: dict[str, str], release: str = "0.24.0", platform: str = "cuda") -> Installation:
    source = VllmSource("", release, f"vllm {release}", files, release)
    return Installation(source, release, release, platform, Definitions(source, platform))


def facts(architecture: str = "LlamaForCausalLM", **text: object) -> ModelFacts:
    return ModelFacts(Path("c"), LLAMA, (architecture,), "", {**LLAMA, **text}, 32, 4096, 128256, 32, 8)


@pytest.mark.parametrize(
    ("installation", "model", "environ", "runner", "why"),
    [
        (make({"vllm/envs.py": ""}), facts(), {}, "V1", "no other"),
        (make(WITH_VARIABLE), facts(), {}, "V1", "default; VLLM_USE_V2_MODEL_RUNNER=1 would change it"),
        (make(WITH_VARIABLE), facts(), {"VLLM_USE_V2_MODEL_RUNNER": "1"}, "V2", "VLLM_USE_V2_MODEL_RUNNER=1"),
        (make(ALL), facts(), {"VLLM_USE_V2_MODEL_RUNNER": "0"}, "V1", "VLLM_USE_V2_MODEL_RUNNER=0"),
        (make(ALL), facts(), {}, "V2", "default for the model"),
        (make(ALL, platform="cpu"), facts(), {}, "V1", "Triton"),
        (make(SOME), facts(), {}, "V1", "LlamaForCausalLM is not among those"),
        (make(SOME), facts("Qwen3ForCausalLM"), {}, "V2", "default for the model"),
        (make(DENSE), facts(), {}, "V2", "default for the model"),
        (make(DENSE), facts(num_local_experts=8), {}, "V1", "is not among those"),
    ],
)
def test_the_runner_is_chosen_as_the_release_does(
    installation: Installation, model: ModelFacts, environ: dict[str, str], runner: str, why: str
) -> None:
    chosen, reason = choose_runner(model, installation, environ)
    assert (chosen, why in reason) == (runner, True), reason


def test_v2_is_refused_where_it_is_not_captured() -> None:
    line = check_runner(facts(), make(WITH_VARIABLE, "0.16.0"), {"VLLM_USE_V2_MODEL_RUNNER": "true"})
    assert line.verdict == "fails"
    assert line.advice == ("Model Runner V2 of vLLM 0.16.0 is not captured, only V1: set VLLM_USE_V2_MODEL_RUNNER=0")
    assert check_runner(facts(), make(ALL), {}).verdict == "ok"
