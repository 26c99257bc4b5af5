"""The old consumer: speculators 0.3.0 as it is on PyPI, whose VllmHiddenStatesGenerator was written for vLLM 0.11.

Everything it asks for is asked in one engine, and every row of every prompt is compared with the transformers forward.
It loads with dtype auto, which runs a float32 checkpoint in bfloat16. The reference has the same rounded weights and
computes in float32, so what is left is the rounding of the activations: 8 bits, a few operations a layer.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.specifiers import SpecifierSet
from safetensors.torch import load_file

from tests.live.runs import Reference, make_prompt, run_python
from tests.tiny_models import write_tiny_deepseek, write_tiny_llama
from vllm_overlay.compat.packages import find_lack

LACK = find_lack("speculators==0.3.*")
pytestmark = [pytest.mark.live, pytest.mark.skipif(LACK is not None, reason=str(LACK))]

SCRIPT = Path(__file__).parent / "scripts" / "speculators_states.py"

# How far a row may be from its reference, in parts of the reference's size (Euclidean). Seen: 0.013 in the middle, and
# 0.053 at most (0.065 in 0.11.0, which has another attention). A row of another token is 0.5 or more away in the last
# layer, one of the same token at another position 0.25.
TOLERANCE = 0.1
SPREAD = 0.08

# A CPU without AVX-512 computes no experts here: their activation asks for vLLM's configuration in mid-forward, where
# there is none.
NO_EXPERTS = (SpecifierSet("==0.14.*"), SpecifierSet(">=0.20,<0.25"))
# Here the CPU computes something else than DeepSeek, without the overlay too: its text is the transformers model's in 1
# token of 32, experts or none. https://github.com/vllm-project/vllm/pull/31643 mended rotary embeddings there.
OTHERWISE_THAN_TRANSFORMERS = SpecifierSet(">=0.12,<0.14")

ON_A_SMALL_CPU = {
    # Its own attention in place of MLA, which is for GPUs in most releases; the decoder layers are the same.
    "VLLM_MLA_DISABLE": "1",
    # 0.11 packs experts for AVX-512 otherwise, and refuses where there is none.
    "VLLM_CPU_MOE_PREPACK": "0",
}


PREFIX = make_prompt(0, 32)
SHARED = [make_prompt(i, length, PREFIX) for i, length in enumerate((33, 36, 48, 64, 71, 90))]
LADDER = [make_prompt(100 + i, i + 1) for i in range(40)]
# More than the 8192 tokens of a step, and not a whole number of prompts: one of them is computed in two chunks.
BEYOND_A_STEP = [make_prompt(200 + i, 300 + i) for i in range(28)]

CALLS = {
    "one prompt": [[SHARED[0]], [SHARED[3]]],
    "the same again": [[SHARED[3]]],
    "a batch": [SHARED],
    "the same batch, backwards": [SHARED[::-1]],
    "40 prompts": [LADDER],
    "beyond a step": [BEYOND_A_STEP],
}


@dataclass(frozen=True)
class Target:
    """A tiny model, the layers asked for as speculators counts them, and those that it takes when none are named."""

    model: Path
    asked: list[int] | None
    layers: list[int]
    environment: dict[str, str]


def vllm_version() -> str:
    """Of the CPU's distribution or the other."""
    return metadata.version("vllm-cpu" if find_lack("vllm-cpu") is None else "vllm")


@pytest.fixture(scope="module", params=["llama", "deepseek"])
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Target:
    folder = tmp_path_factory.mktemp("model")
    if request.param == "llama":
        return Target(write_tiny_llama(folder, layers=8, spread=SPREAD), None, [2, 4, 5, 7], {})
    if vllm_version() in OTHERWISE_THAN_TRANSFORMERS:
        pytest.skip(f"the CPU of vLLM {vllm_version()} computes DeepSeek otherwise than transformers, without us too")
    dense_layers = 4 if any(vllm_version() in releases for releases in NO_EXPERTS) else 1
    model = write_tiny_deepseek(folder, layers=4, dense_layers=dense_layers, spread=SPREAD)
    return Target(model, [0, 2, 3], [0, 2, 3], ON_A_SMALL_CPU)


def run_generator(
    folder: Path, target: Target, calls: list[list[list[int]]], environment: dict[str, str], **options: Any
) -> tuple[subprocess.CompletedProcess[str], dict[str, torch.Tensor]]:
    """The script's end, and what it kept: nothing if it failed."""
    plan, out = folder / "plan.json", folder / "states.safetensors"
    generator = {"model_path": str(target.model), "layer_ids": target.asked, "max_model_len": 512} | options
    plan.write_text(json.dumps({"generator": generator, "calls": calls, "out": str(out)}))
    done = run_python([str(SCRIPT), str(plan)], target.environment | environment)
    return done, load_file(out) if done.returncode == 0 else {}


def distances(states: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """How far each row is from where it should be, in parts of the row's size, `[layers, tokens]`."""
    return (states.float() - expected).norm(dim=-1) / expected.norm(dim=-1)


def find_nearest(states: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """For each row of the last layer, which of the prompt's reference rows is nearest, `[tokens]`."""
    return torch.cdist(states[-1].float(), expected[-1]).argmin(dim=1)


def find_faults(states: dict[str, torch.Tensor], target: Target) -> list[str]:
    """Prompts whose states are not their own, one line each."""
    reference = Reference(target.model)
    reference.model.bfloat16().float()
    faults = []
    for number, (name, prompts) in enumerate((name, prompts) for name, group in CALLS.items() for prompts in group):
        for place, prompt in enumerate(prompts):
            found = states[f"{number}.{place}"]
            # Ours are counted from the embeddings, speculators' from after the first layer.
            expected = reference.states(torch.tensor(prompt))[:, [layer + 1 for layer in target.layers]].transpose(0, 1)
            fault = describe_fault(found, expected)
            if fault:
                faults.append(f"{name}, prompt {place}: {fault}")
    return faults


def describe_fault(found: torch.Tensor, expected: torch.Tensor) -> str | None:
    """What is wrong with a prompt's states `[layers, tokens, hidden]`; None if nothing is."""
    if found.shape != expected.shape:
        return f"expected the shape {[*expected.shape]}, found {[*found.shape]}"
    far = distances(found, expected)
    if float(far.max()) > TOLERANCE:
        return f"position {int(far.amax(0).argmax())} is {float(far.max()):.3f} of its size off"
    wrong = (find_nearest(found, expected) != torch.arange(found.shape[1])).nonzero()
    return f"position {int(wrong[0])} is another's" if len(wrong) else None


def say_outcome(done: subprocess.CompletedProcess[str], states: dict[str, torch.Tensor], target: Target) -> str:
    """`right`, how many prompts are not, or the last line of the error that the script died of."""
    if done.returncode != 0:
        errors = [line for line in done.stderr.splitlines() if re.match(r"[\w.]*(Error|Exception|Annotation)\b", line)]
        return errors[-1] if errors else done.stderr.strip()[-200:]
    faults = find_faults(states, target)
    return f"{len(faults)} prompts wrong: {faults[0]}, ..." if faults else "right"


ALL_CALLS = [prompts for group in CALLS.values() for prompts in group]


@pytest.mark.timeout(1200)
def test_every_row_is_its_own_prompts(target: Target, tmp_path: Path) -> None:
    """CASES 1 to 4 and 16 with the old consumer."""
    done, states = run_generator(tmp_path, target, ALL_CALLS, {"VLLM_OVERLAY": "1"})
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    assert find_faults(states, target) == []


@pytest.mark.timeout(1200)
def test_without_the_overlay_it_fails_or_is_wrong(
    target: Target, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """What the overlay buys; the outcome goes into the report."""
    outcome = say_outcome(*run_generator(tmp_path, target, ALL_CALLS, {}), target)
    record_property("speculators 0.3.0 without the overlay", outcome)
    print(f"without the overlay: {outcome}")
    assert outcome != "right"


def test_the_check_can_fail(target: Target) -> None:
    """A row beside its place, another prompt's rows and a layer too early are all seen."""
    reference = Reference(target.model)
    layers = [layer + 1 for layer in target.layers]
    states, other = (reference.states(torch.tensor(prompt)).transpose(0, 1) for prompt in BEYOND_A_STEP[:2])
    expected = states[layers]
    assert describe_fault(expected.bfloat16(), expected) is None
    assert describe_fault(expected.roll(1, dims=1), expected)
    assert describe_fault(other[layers][:, : expected.shape[1]], expected)
    assert describe_fault(states[target.layers], expected)
    assert describe_fault(expected[:, :-1], expected)
    swapped = expected.clone()
    swapped[:, [5, 6]] = expected[:, [6, 5]]
    assert describe_fault(swapped, expected)
