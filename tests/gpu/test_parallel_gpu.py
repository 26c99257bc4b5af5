"""Capture on two GPUs: tensor and pipeline parallel, compiled, CUDA graphs, both against the transformers forward.

Also a mixture of experts with MLA, whose experts are spread over the two ranks; two data-parallel engines behind a
server; and a rank that is killed.
"""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.live.killed import expect_the_rank, expect_whole_records, kill_a_rank
from tests.live.runs import Answer, Batch, Reference, clean_environment, run_script
from tests.live.server import ask_all_at_once
from tests.tiny_models import FOR_GPU_KERNELS, write_tiny_deepseek, write_tiny_llama
from vllm_overlay.store import Record, Store

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs"),
]

LAYERS = 8
# Rounding of 16 bits in wide random weights (0.064 seen on one GPU); a crossed row differs by 1.4.
TOLERANCE = 0.2
COLUMNS = (8, 0, 2, 5)  # over both stages, out of order
PREFIX = random.Random(0).choices(range(4, 128), k=48)


def make_prompts(seed: int) -> list[list[int]]:
    generator = random.Random(seed)
    return [PREFIX + generator.choices(range(4, 128), k=length) for length in range(9, 57, 2)]


BATCHES = [Batch(make_prompts(1), 32), Batch(make_prompts(1), 16)]
RANKS: dict[str, dict[str, Any]] = {
    "tensor": {"tensor_parallel_size": 2},
    "pipeline": {"pipeline_parallel_size": 2},
    "experts": {"tensor_parallel_size": 2, "enable_expert_parallel": True},
}


def write_model(folder: Path, ranks: str) -> Path:
    if ranks != "experts":
        return write_tiny_llama(folder, layers=LAYERS)
    return write_tiny_deepseek(folder, layers=LAYERS, dense_layers=1, spread=0.08, latent=FOR_GPU_KERNELS)


@pytest.mark.parametrize("ranks", list(RANKS))
def test_rows_of_two_ranks_are_those_of_the_model(ranks: str, tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", ranks)
    batches = run_script(
        tmp_path / "run", model, BATCHES, environment=capturing(tmp_path), dtype="bfloat16", enforce_eager=False,
        gpu_memory_utilization=0.3, max_num_batched_tokens=512, **RANKS[ranks],
    )  # fmt: skip
    answers: list[Answer] = [answer for batch in batches for answer in batch]
    prompts = [prompt for batch in BATCHES for prompt in batch.prompts]
    reference = Reference(model)
    worst, right, total = 0.0, 0, 0
    with Store.open(tmp_path / "store") as store:
        assert len(store) == len(prompts)
        for prompt, answer in zip(prompts, answers, strict=True):
            record = store[answer.request_id]
            assert record.complete
            assert record.token_ids.tolist() == (prompt + answer.token_ids)[:-1]
            worst = max(worst, largest_difference(record, reference))
            chosen = reference.logits_of(record.hidden_states[len(prompt) - 1 :, 0].float()).argmax(-1)
            right += int((chosen == torch.tensor(answer.token_ids)).sum())
            total += len(answer.token_ids)
    print(f"\n{ranks}: largest relative difference {worst:.4f}, next token from the last state {right} of {total}")
    assert worst < TOLERANCE
    assert right / total > 0.95


def test_replicas_behind_a_server_write_one_store(tmp_path: Path) -> None:
    """`vllm serve --data-parallel-size 2`: vLLM 0.24 has no data-parallel `LLM` for a dense model."""
    model = write_tiny_llama(tmp_path / "model", layers=LAYERS)
    environment = clean_environment(capturing(tmp_path))
    prompts = {f"t{i}": f"prompt number {i}, and " + "x" * (2 * i) for i in range(24)}
    engine = ["--dtype", "bfloat16", "--max-model-len", "256", "--gpu-memory-utilization", "0.3"]
    ids = ask_all_at_once(tmp_path, model, prompts, environment, *engine, "--data-parallel-size", "2")
    reference = Reference(model)
    with Store.open(tmp_path / "store") as store:
        assert sorted(str(record.tag) for record in store) == sorted(prompts)
        assert len(store.index.execute("SELECT DISTINCT log FROM records")) == 2
        assert all(record.complete and record.request_id.startswith(ids[str(record.tag)]) for record in store)
        worst = max(largest_difference(record, reference) for record in store)
    print(f"\ndata: largest relative difference {worst:.4f}")
    assert worst < TOLERANCE


def test_a_rank_that_is_killed_is_named_and_what_was_committed_is_whole(tmp_path: Path) -> None:
    model = write_tiny_llama(tmp_path / "model", layers=LAYERS)
    killed = kill_a_rank(
        tmp_path / "run", model, BATCHES, capturing(tmp_path), dtype="bfloat16", gpu_memory_utilization=0.3,
        tensor_parallel_size=2,
    )  # fmt: skip
    expect_the_rank(killed)
    expect_whole_records(killed, BATCHES, tmp_path / "store")
    print("\nkilled:", re.search("what failed first: (.*)", killed.text))


def capturing(folder: Path) -> dict[str, str]:
    return {
        "VLLM_OVERLAY": "1",
        "VLLM_OVERLAY_CAPTURE": str(folder / "store"),
        "VLLM_OVERLAY_LAYERS": ",".join(map(str, COLUMNS)),
        "VLLM_CACHE_ROOT": str(folder / "cache"),
    }


def largest_difference(record: Record, reference: Reference) -> float:
    """From the transformers forward, of any column, relative to its size."""
    expected = reference.states(record.token_ids)[:, list(COLUMNS)]
    size = expected.pow(2).mean(dim=(0, 2)).sqrt()
    difference = (record.hidden_states.float() - expected).pow(2).mean(dim=(0, 2)).sqrt()
    return float((difference / size).max())
