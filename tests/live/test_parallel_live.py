"""CASES 12: engines of two ranks over gloo, tensor and pipeline parallel, against the transformers forward.

One writer a column: with tensor parallelism rank 0, with pipeline parallelism each stage for the layers it computes.
And data parallel: each replica writes the requests that it got, whole.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from packaging.specifiers import SpecifierSet

from tests.live.runs import Answer, Batch, Reference, clean_environment, make_prompt, run_script
from tests.live.server import ask_all_at_once, find_port
from tests.tiny_models import write_tiny_llama, write_tiny_mixtral
from vllm_overlay.store import Store, summarize

pytestmark = pytest.mark.live

VLLM = metadata.version(metadata.packages_distributions()["vllm"][0])
# Before, vLLM has no exchange between experts on CPUs; after, one that calls all_gatherv, which CPUs have not.
EXPERTS_OVER_REPLICAS = SpecifierSet(">=0.15,<0.20")

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
    """CASES 12."""
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
    """CASES 12."""
    ranks, _, folder = captured
    shards = sorted(path.name for path in (folder / "shards").glob("*.safetensors"))
    assert len(shards) == (1 if ranks == "tensor" else 2), shards


NUM_REPLICAS = 2


@pytest.mark.skipif(
    VLLM not in EXPERTS_OVER_REPLICAS, reason=f"vLLM {VLLM} cannot spread experts over replicas on a CPU"
)
def test_replicas_of_experts_write_their_own_requests_and_no_dummy_steps(tmp_path: Path) -> None:
    """Two engines that compute experts together; the second runs out of requests and goes on with dummy batches."""
    model = write_tiny_mixtral(tmp_path / "model", layers=LAYERS)
    batches = [
        Batch([make_prompt(30, 40), make_prompt(31, 7)], 30),
        Batch([make_prompt(32, 20)], 4),
    ]
    port = str(find_port())

    def run_replica(rank: int) -> list[list[Answer]]:
        environment = {
            "VLLM_OVERLAY": "1",
            "VLLM_OVERLAY_CAPTURE": str(tmp_path / "store"),
            "VLLM_OVERLAY_LAYERS": "all",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_DP_RANK": str(rank),
            "VLLM_DP_RANK_LOCAL": str(rank),
            "VLLM_DP_SIZE": str(NUM_REPLICAS),
            "VLLM_DP_MASTER_IP": "127.0.0.1",
            "VLLM_DP_MASTER_PORT": port,
        }
        return run_script(tmp_path / str(rank), model, [batches[rank]], environment=environment)

    with ThreadPoolExecutor(NUM_REPLICAS) as pool:
        answers = list(pool.map(run_replica, range(NUM_REPLICAS)))
    texts = [
        (prompt + answer.token_ids)[:-1]
        for batch, (of_replica,) in zip(batches, answers, strict=True)
        for prompt, answer in zip(batch.prompts, of_replica, strict=True)
    ]
    reference = Reference(model)
    with Store.open(tmp_path / "store") as store:
        assert sorted(record.token_ids.tolist() for record in store) == sorted(texts)
        summary = summarize(store)
        assert (summary.complete, summary.logs, summary.logs_unclean) == (3, NUM_REPLICAS, 0)
        assert summary.rows_stored == sum(map(len, texts))
        for record in store:
            difference = (record.hidden_states - reference.states(record.token_ids)).abs().max()
            assert float(difference) < TOLERANCE, record.request_id


@pytest.mark.skipif(VLLM == "0.16.0", reason="the newest is enough: two engines and a server")
def test_replicas_behind_a_server_write_one_store(tmp_path: Path, model: Path) -> None:
    """`vllm serve --data-parallel-size 2`: every record under its own id, in the log of the replica that had it."""
    environment = clean_environment(
        {
            "VLLM_OVERLAY": "1",
            "VLLM_OVERLAY_CAPTURE": str(tmp_path / "store"),
            "VLLM_OVERLAY_LAYERS": "0,2,4",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        }
    )
    prompts = {f"t{i}": f"prompt number {i}, and " + "x" * i for i in range(12)}
    engine = ["--dtype", "float32", "--enforce-eager", "--max-model-len", "256"]
    ids = ask_all_at_once(tmp_path, model, prompts, environment, *engine, "--data-parallel-size", str(NUM_REPLICAS))
    reference = Reference(model)
    with Store.open(tmp_path / "store") as store:
        assert sorted(str(record.tag) for record in store) == sorted(prompts)
        by_log = dict(store.index.execute("SELECT log, count(*) FROM records GROUP BY log"))
        assert len(by_log) == NUM_REPLICAS
        assert summarize(store).logs_unclean == 0
        for record in store:
            assert record.request_id.startswith(ids[str(record.tag)])
            assert record.complete
            assert record.num_prompt_tokens == len(prompts[str(record.tag)])
            difference = (record.hidden_states - reference.states(record.token_ids)[:, [0, 2, 4]]).abs().max()
            assert float(difference) < TOLERANCE, record.request_id
