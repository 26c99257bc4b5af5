"""CASES 12 and 14: engines of two ranks over gloo, tensor and pipeline parallel, against the transformers forward.

One writer a column: with tensor parallelism rank 0, with pipeline parallelism each stage for the layers it computes.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tests.live.runs import Answer, Batch, Reference, run_script
from tests.tiny_models import write_tiny_llama
from vllm_overlay.store import Store

pytestmark = pytest.mark.live

LAYERS = 4
TOLERANCE = 1e-4
# Out of order, and over both stages: 0 to 2 are the first one's, 3 and 4 the second's.
COLUMNS = (4, 0, 3, 1, 2)
# Without compilation the CPU worker of 0.32 leaves out the warm-up in which a stage makes room for what it is sent.
TRACED = {"enforce_eager": False, "compilation_config": {"mode": 3, "backend": "eager"}}
RANKS: dict[str, dict[str, Any]] = {
    "tensor": {"tensor_parallel_size": 2},
    "pipeline": {"pipeline_parallel_size": 2, **TRACED},
}


def make_prompt(seed: int, length: int, prefix: list[int] | None = None) -> list[int]:
    generator = random.Random(seed)
    return [*(prefix or []), *(generator.randrange(4, 128) for _ in range(length - len(prefix or [])))]


PREFIX = make_prompt(0, 40)
BATCHES = [
    # A shared prefix of a block and a bit; prompts cut by the budget; more prompts than run at a time.
    Batch([make_prompt(10 + i, length, PREFIX) for i, length in enumerate((41, 45, 64, 70))], 3),
    Batch([make_prompt(10, 41, PREFIX)], 12),
    Batch([make_prompt(20 + i, length) for i, length in enumerate((1, 2, 3, 5, 8, 13, 21, 34, 55, 89))], 4),
]
LIMITS = {"max_num_batched_tokens": 48, "max_num_seqs": 8, "block_size": 32, "enable_chunked_prefill": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model"), layers=LAYERS, spread=0.05)


@pytest.fixture(scope="module", params=list(RANKS))
def captured(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, model: Path
) -> tuple[str, list[list[Answer]], Path]:
    folder = tmp_path_factory.mktemp("captured")
    environment = {
        "VLLM_OVERLAY": "1",
        # vLLM would give each rank a NUMA node of its own, and a small machine has one.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_OVERLAY_CAPTURE": str(folder / "store"),
        "VLLM_OVERLAY_LAYERS": ",".join(map(str, COLUMNS)),
    }
    answers = run_script(folder, model, BATCHES, environment=environment, **LIMITS, **RANKS[request.param])
    return request.param, answers, folder / "store"


def test_states_are_the_reference(captured: tuple[str, list[list[Answer]], Path], model: Path) -> None:
    _, answers, folder = captured
    reference = Reference(model)
    requests = [
        (prompt, answer)
        for batch, batch_answers in zip(BATCHES, answers, strict=True)
        for prompt, answer in zip(batch.prompts, batch_answers, strict=True)
    ]
    with Store.open(folder) as store:
        assert store.layer_ids == COLUMNS
        assert len(store) == len(requests)
        assert list(store.verify()) == []
        for prompt, answer in requests:
            record = store[answer.request_id]
            assert record.complete
            assert record.token_ids.tolist() == (prompt + answer.token_ids)[:-1], f"request {answer.request_id}"
            expected = reference.states(record.token_ids)[:, list(COLUMNS)]
            difference = (record.hidden_states - expected).abs().amax(dim=(0, 2))
            assert float(difference.max()) < TOLERANCE, f"request {answer.request_id}: {difference.tolist()}"


def test_every_column_has_one_writer(captured: tuple[str, list[list[Answer]], Path]) -> None:
    ranks, _, folder = captured
    shards = sorted(path.name for path in (folder / "shards").glob("*.safetensors"))
    assert len(shards) == (1 if ranks == "tensor" else 2), shards
