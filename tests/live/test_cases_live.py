"""Cases that want a model or a KV cache of their own: small engines in one process, against transformers.

The cases that any engine shows are test_capture_live's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.specifiers import SpecifierSet
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests.live.runs import ENGINE, Answer, Batch, Reference, make_prompt, run_python
from tests.tiny_models import (
    FOR_GPU_KERNELS,
    write_tiny_deepseek,
    write_tiny_gemma2,
    write_tiny_gemma4,
    write_tiny_llama,
)
from vllm_overlay.cli import main
from vllm_overlay.store import Store, summarize

pytestmark = pytest.mark.live

SCRIPT = Path(__file__).parent / "scripts" / "engines.py"
VLLM = metadata.version(metadata.packages_distributions()["vllm"][0])
LATENT_ON_CPU = VLLM in SpecifierSet(">=0.28")
# Gemma 4's: before, vLLM asks for one size of its heads, where transformers 5.19 has one for each layer.
BLOCKS_OF_TWO_SIZES = VLLM in SpecifierSet(">=0.32")
LAYERS = 4
TOLERANCE = 1e-4


# More than two blocks of 32, and more than a window of 32.
PREFIX = make_prompt(0, 80)
# From the cache, alone and in a batch, and the same again; prompts that a step of 48 tokens cuts.
SHARING = [
    Batch([make_prompt(1, 90, PREFIX)], 3),
    Batch([make_prompt(10 + i, length, PREFIX) for i, length in enumerate((81, 96, 97, 130, 161))], 3),
    Batch([make_prompt(10 + i, length, PREFIX) for i, length in enumerate((81, 96, 97, 130, 161))], 3),
    Batch([make_prompt(20 + i, length) for i, length in enumerate((1, 31, 32, 33, 100))], 3),
]
# The token whose embedding is zero, or no number, in the checkpoints of CASES 10; position 3 of the second prompt.
DEAD_TOKEN = 50
WITH_DEAD_TOKEN = [Batch([[5, 6, 7, 8, 9], [5, 6, 7, DEAD_TOKEN, 9]], 200)]
PLAIN = [Batch([make_prompt(30, 40), make_prompt(31, 7)], 6)]
LIMITS = {"max_num_batched_tokens": 48, "max_num_seqs": 8, "block_size": 32, "enable_chunked_prefill": True}
# Four blocks that can be used: when the first prompt takes its third, the second has computed 20 of its 40 tokens, and
# there is none for the rest of them.
PRESSED = {"max_num_batched_tokens": 21, "max_model_len": 128, "num_gpu_blocks_override": 5}
TOO_LONG_FOR_ALL = [Batch([make_prompt(40, 63), make_prompt(41, 40)], 4)]
SYSTEM = make_prompt(50, 1000)
QUESTIONS = [Batch([make_prompt(100 + i, len(SYSTEM) + 40 + i, SYSTEM) for i in range(64)], 32)]
ROOMY = {
    "max_num_batched_tokens": 1024,
    "max_num_seqs": 64,
    "max_model_len": 1152,
    "hf_overrides": {"max_position_embeddings": 1152},
}


@dataclass(frozen=True)
class Case:
    """An engine: its model, what its layers and prompts are, and what else it is told."""

    model: Path
    layers: str | None
    batches: list[Batch]
    engine: Mapping[str, Any]
    variables: Mapping[str, str]


@dataclass(frozen=True)
class Outcome:
    """What `scripts/engines.py` found, and where the store is."""

    case: Case
    answers: list[list[Answer]]
    counters: dict[str, int]
    groups: list[tuple[str, int]]
    error: list[str]
    store: Path


def change_weights(model: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    file = model / "model.safetensors"
    weights = load_file(file)
    change(weights)
    save_file(weights, file, metadata={"format": "pt"})
    return model


def make_zero(weights: dict[str, torch.Tensor]) -> None:
    """The state of this token after the first layer."""
    weights["model.embed_tokens.weight"][DEAD_TOKEN] = 0.0
    weights["model.layers.0.self_attn.o_proj.weight"].zero_()
    weights["model.layers.0.mlp.down_proj.weight"].zero_()


def make_nan(weights: dict[str, torch.Tensor]) -> None:
    weights["model.embed_tokens.weight"][DEAD_TOKEN] = torch.nan


def make_small(weights: dict[str, torch.Tensor]) -> None:
    """Gemma 4's norms behind its sub-layers: where states are of size 15, rounding is above the tolerance."""
    for name, weight in weights.items():
        if ".post_" in name:
            weight.mul_(0.2)


def write_cases(folder: Path) -> dict[str, Case]:
    llama = write_tiny_llama(folder / "llama", layers=LAYERS, spread=0.05)
    shallow = write_tiny_llama(folder / "shallow", layers=3, spread=0.05)
    zero = change_weights(write_tiny_llama(folder / "zero", layers=LAYERS, spread=0.05), make_zero)
    nan = change_weights(write_tiny_llama(folder / "nan", layers=LAYERS, spread=0.05), make_nan)
    # Without experts: some releases' need AVX-512 on a CPU.
    latent = write_tiny_deepseek(folder / "latent", layers=LAYERS, dense_layers=LAYERS, spread=0.05)

    def case(
        model: Path, layers: str | None, batches: list[Batch], engine: Mapping[str, Any] = {}, **variables: str
    ) -> Case:
        return Case(model, layers, batches, engine, variables)

    def as_class(name: str) -> Mapping[str, Any]:
        return {"hf_overrides": {"architectures": [name]}}

    cases = {
        "pre-empted": case(llama, "2,3,4", TOO_LONG_FOR_ALL, PRESSED),
        # Rows of 4,608 bytes, as four layers of SmolLM2-135M: beside smaller ones the token ids in the index are much.
        "system prompt": case(write_tiny_llama(folder / "deep", layers=8, spread=0.05), "all", QUESTIONS, ROOMY),
        "overwriting": case(llama, "1,2,4", PLAIN, as_class("Overwriting")),
        "unhooked": case(llama, "1,2,4", PLAIN, as_class("Unhooked")),
        "zero": case(zero, "1,2,4", WITH_DEAD_TOKEN),
        "nan": case(nan, "1,2,4", WITH_DEAD_TOKEN),
        "two groups": case(write_tiny_gemma2(folder / "gemma2"), "all", SHARING),
        "latent": case(latent, "1,2,4", PLAIN, VLLM_MLA_DISABLE="1"),
        "no such layer": case(shallow, "1,2,4", PLAIN),
        "too shallow": case(llama, None, PLAIN),
    }
    if BLOCKS_OF_TWO_SIZES:
        gemma4 = change_weights(write_tiny_gemma4(folder / "gemma4"), make_small)
        cases["two block sizes"] = case(gemma4, "all", SHARING)
    if LATENT_ON_CPU:
        wide = write_tiny_deepseek(folder / "wide", dense_layers=LAYERS, spread=0.05, latent=FOR_GPU_KERNELS)
        cases["latent attention"] = case(wide, "1,2,4", PLAIN, VLLM_MLA_DISABLE="0")
    return cases


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    folder = tmp_path_factory.mktemp("cases")
    cases = write_cases(folder / "models")
    engines = {
        name: {
            "engine": {**ENGINE, **LIMITS, "disable_log_stats": False, "model": str(case.model), **case.engine},
            "batches": [batch.to_json() for batch in case.batches],
            "variables": describe_capture(folder, name, case),
        }
        for name, case in cases.items()
    }
    plan, out = folder / "plan.json", folder / "out.json"
    models = ["LlamaForCausalLM", "Gemma2ForCausalLM", "DeepseekV3ForCausalLM"]
    models += ["Gemma4ForCausalLM"] * BLOCKS_OF_TWO_SIZES
    plan.write_text(json.dumps({"models": models, "engines": engines}))
    # The patches for capture are chosen when vLLM is imported, before there are engines.
    environment = {
        "VLLM_OVERLAY": "1",
        "VLLM_OVERLAY_CAPTURE": str(folder / "no store"),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        # Eager or not, vLLM 0.11 compiles Gemma's norm on a CPU, for each shape anew: minutes.
        "TORCH_COMPILE_DISABLE": "1",
    }
    done = run_python([str(SCRIPT), str(plan), str(out)], environment)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    found = json.loads(out.read_text())
    return {name: read_outcome(found[name], cases[name], folder / name) for name in cases}


def describe_capture(folder: Path, name: str, case: Case) -> dict[str, str]:
    layers = {} if case.layers is None else {"VLLM_OVERLAY_LAYERS": case.layers}
    return {"VLLM_OVERLAY_CAPTURE": str(folder / name), **layers, **case.variables}


def read_outcome(found: dict[str, Any], case: Case, store: Path) -> Outcome:
    answers = [[Answer(one["id"], one["token_ids"]) for one in batch["requests"]] for batch in found["batches"]]
    groups = [(kind, size) for kind, size in found["groups"]]
    return Outcome(case, answers, found["counters"], groups, found["error"], store)


def check_records(outcome: Outcome, every: int = 1) -> None:
    """Every request has its complete record, and every row of so many of them is the reference's."""
    assert outcome.error == []
    reference = Reference(outcome.case.model)
    requests = [
        (prompt, answer)
        for batch, answers in zip(outcome.case.batches, outcome.answers, strict=True)
        for prompt, answer in zip(batch.prompts, answers, strict=True)
    ]
    with Store.open(outcome.store) as store:
        assert len(store) == len(requests)
        for number, (prompt, answer) in enumerate(requests):
            record = store[answer.request_id]
            assert record.complete
            assert record.num_prompt_tokens == len(prompt)
            assert record.token_ids.tolist() == (prompt + answer.token_ids)[:-1], f"request {answer.request_id}"
            if number % every:
                continue
            expected = reference.states(record.token_ids)[:, list(store.layer_ids)]
            assert float((record.hidden_states - expected).abs().max()) < TOLERANCE, f"request {answer.request_id}"
            assert bool((record.hidden_states != 0).any(dim=-1).all())


def check_rows_are_the_computed_tokens(outcome: Outcome) -> None:
    """As many rows as vLLM counts tokens that it computed: of the prompts those not from its cache, and generated ones
    but each request's last, of which there is no state.
    """
    requests = sum(map(len, outcome.answers))
    prompts = sum(len(prompt) for batch in outcome.case.batches for prompt in batch.prompts)
    counters = outcome.counters
    computed = prompts - counters["vllm:prefix_cache_hits"] + counters["vllm:generation_tokens"] - requests
    with Store.open(outcome.store) as store:
        assert summarize(store).rows_stored == computed


def test_a_prompt_that_is_preempted_in_its_middle(outcomes: dict[str, Outcome]) -> None:
    """CASES 5: 20 of 40 computed, pre-empted, resumed from 0, and 3 steps of decoding; each position is there once."""
    outcome = outcomes["pre-empted"]
    check_records(outcome)
    assert outcome.counters["vllm:num_preemptions"] == 1
    with Store.open(outcome.store) as store:
        first, second = (store[answer.request_id] for answer in outcome.answers[0])
        assert (len(first.token_ids), len(second.token_ids)) == (63 + 3, 40 + 3)
        assert summarize(store).rows_stored == (63 + 3) + 20 + (40 + 3)


def test_a_shared_system_prompt_takes_disk_once(outcomes: dict[str, Outcome]) -> None:
    """64 requests that share 1,000 tokens: less than 1.1 x the bytes of the distinct tokens, index and log included."""
    outcome = outcomes["system prompt"]
    check_records(outcome, every=21)
    pairs = zip(QUESTIONS[0].prompts, outcome.answers[0], strict=True)
    texts = [(prompt + answer.token_ids)[:-1] for prompt, answer in pairs]
    # Two tokens are the same if all before them are.
    behind = {tuple(text[len(SYSTEM) : end]) for text in texts for end in range(len(SYSTEM) + 1, len(text) + 1)}
    with Store.open(outcome.store) as store:
        distinct = (len(SYSTEM) + len(behind)) * store.meta.row_bytes
    on_disk = sum(file.stat().st_size for file in outcome.store.rglob("*") if file.is_file())
    print(f"{on_disk} bytes on disk, {on_disk / distinct:.3f} x those of the distinct tokens")
    assert distinct <= on_disk < 1.1 * distinct


def test_ids_after_a_layer_are_imported_as_ours(
    outcomes: dict[str, Outcome], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """CASES 16: the outputs of layers 1, 2, 3, counted from 0, are ids 2, 3, 4; there and back is the identity."""
    source = outcomes["pre-empted"].store
    files, again = tmp_path / "files", tmp_path / "again"
    assert main(["convert", str(source), "--to", "vllm", "--ids", "after-layer", "-o", str(files)]) == 0
    assert main(["convert", str(files), "--from", "vllm", "-o", str(again)]) == 0
    reference = Reference(outcomes["pre-empted"].case.model)
    written = sorted(files.glob("*.safetensors"))
    assert len(written) == 2
    for file in written:
        with safe_open(file, "pt") as opened:
            assert opened.metadata()["layer_ids"] == "[1, 2, 3]"
        tensors = load_file(file)
        # Of the reference's states, 0 is the embeddings and the output of layer i is i + 1.
        expected = torch.stack([reference.states(tensors["token_ids"])[:, i + 1] for i in (1, 2, 3)], dim=1)
        assert float((tensors["hidden_states"] - expected).abs().max()) < TOLERANCE
    with Store.open(source) as store, Store.open(again) as copy:
        assert copy.layer_ids == store.layer_ids == (2, 3, 4)
        for record, copied in zip(store, copy, strict=True):
            assert copied.token_ids.equal(record.token_ids)
            assert copied.hidden_states.equal(record.hidden_states)


def test_a_layer_that_overwrites_its_output_in_the_next_call(outcomes: dict[str, Outcome]) -> None:
    """CASES 7: all layers hand on the same memory, which holds something else after the step."""
    check_records(outcomes["overwriting"])


def test_every_row_is_a_token_that_was_computed(outcomes: dict[str, Outcome]) -> None:
    """CASES 8, as far as a CPU shows it: no row is stored that no token has. The padded steps of full CUDA graphs are
    tests/gpu/test_capture_gpu.py's.
    """
    for name in ("overwriting", "two groups"):
        check_rows_are_the_computed_tokens(outcomes[name])
    assert outcomes["two groups"].counters["vllm:prefix_cache_hits"] > 0


def test_taps_that_do_not_fire_are_an_error(outcomes: dict[str, Outcome]) -> None:
    """CASES 9: hooks that nobody calls. vLLM generates all the same, and there is no store of nothing."""
    call, text = outcomes["unhooked"].error
    assert call in ("generate", "close")
    assert "request '0', position 0, layer 1: the row is not finite; the tap did not fire in this step" in text
    with Store.open(outcomes["unhooked"].store) as store:
        assert len(store) == 0


# A sum over positions that are masked is no number either where one of them is none.
@pytest.mark.parametrize(
    ("name", "found"),
    [("zero", "position 3, layer 1: the row is all zero"), ("nan", r"position \d, layer 1: the row is not finite")],
)
def test_a_dead_row_stops_capture(name: str, found: str, outcomes: dict[str, Outcome]) -> None:
    """CASES 10: the model itself computes it, in the second of two requests."""
    outcome = outcomes[name]
    call, text = outcome.error
    assert call == "generate"
    assert re.search(f"request '1', {found}", text), text
    with Store.open(outcome.store) as store:
        assert len(store) == 0


def test_the_second_of_two_groups_is_the_one_that_matters(outcomes: dict[str, Outcome]) -> None:
    """CASES 11: layers with a window come first; only the second group's blocks hold whole prefixes."""
    outcome = outcomes["two groups"]
    assert outcome.groups == [("SlidingWindowSpec", 32), ("FullAttentionSpec", 32)]
    assert outcome.counters["vllm:prefix_cache_hits"] > 0
    check_records(outcome)


def test_two_groups_with_different_block_sizes(outcomes: dict[str, Outcome]) -> None:
    """CASES 11: a head of half the size makes the blocks of the first group twice as long."""
    if not BLOCKS_OF_TWO_SIZES:
        pytest.skip(f"no model with heads of two sizes is one that vLLM {VLLM} and its transformers both run")
    outcome = outcomes["two block sizes"]
    assert outcome.groups == [("SlidingWindowSpec", 64), ("FullAttentionSpec", 32)]
    assert outcome.counters["vllm:prefix_cache_hits"] > 0
    check_records(outcome)
    check_rows_are_the_computed_tokens(outcome)


def test_three_layers_of_a_model_with_latent_attention(outcomes: dict[str, Outcome]) -> None:
    """CASES 14: three states, never two. In its decoder layers; the attention's kernel is vLLM's ordinary one."""
    outcome = outcomes["latent"]
    check_records(outcome)
    with Store.open(outcome.store) as store:
        assert store.layer_ids == (1, 2, 4)
        assert {record.hidden_states.shape[1] for record in store} == {3}


def test_three_layers_above_latent_attention(outcomes: dict[str, Outcome]) -> None:
    """CASES 14: with vLLM's own attention, whose states on a CPU are not transformers'; the last gives the text."""
    if not LATENT_ON_CPU:
        pytest.skip(f"vLLM {VLLM} has no latent attention on a CPU")
    outcome = outcomes["latent attention"]
    assert outcome.error == []
    assert outcome.groups[0][0] == "MLAAttentionSpec"
    reference = Reference(outcome.case.model)
    with Store.open(outcome.store) as store:
        for prompt, answer in zip(outcome.case.batches[0].prompts, outcome.answers[0], strict=True):
            record = store[answer.request_id]
            assert record.complete
            assert record.hidden_states.shape == (len(prompt) + len(answer.token_ids) - 1, 3, 128)
            chosen = reference.logits_of(record.hidden_states[len(prompt) - 1 :, 2]).argmax(-1)
            assert chosen.tolist() == answer.token_ids


def test_a_layer_that_there_is_not(outcomes: dict[str, Outcome]) -> None:
    """CASES 13 and 14: named, and before the weights are read."""
    call, text = outcomes["no such layer"].error
    assert call == "start"
    assert "layer ids [4] do not exist: this model has ids 0 to 3" in text
    assert not outcomes["no such layer"].store.exists()


def test_a_model_that_is_too_shallow_for_the_default(outcomes: dict[str, Outcome]) -> None:
    """CASES 15."""
    call, text = outcomes["too shallow"].error
    assert call == "start"
    assert "for this model's N=4 are 2, 2, 1, 4: too shallow; name the layers you want" in text
