"""speculators' worker extension, mixed into a worker as vLLM does it: its three methods are answered by our capture."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.patches.conftest import Apply
from tests.patches.old_consumer import import_old_consumer
from vllm_overlay import activation
from vllm_overlay.patches.capture_for_speculators import PATCH
from vllm_overlay.settings import read_settings


class DecoderLayer(torch.nn.Module):
    """Called positionally and with a fourth argument, as DeepSeek's; adds 1 to the stream."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(1))

    def forward(self, positions: Any, hidden_states: Any, residual: Any, llama_4_scaling: Any = None) -> Any:
        return hidden_states + self.scale, residual if residual is not None else torch.zeros_like(hidden_states)


class Model(torch.nn.Module):
    """No `model` inside and no EAGLE-3 interface."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(DecoderLayer() for _ in range(4))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        residual = None
        for layer in self.layers:
            hidden, residual = layer(None, hidden, residual, None)
        return hidden


class Worker:
    """The part of a worker that capture looks at; a step's row is its token id."""

    def __init__(self) -> None:
        shape = SimpleNamespace(model_type="llama", num_hidden_layers=4)
        self.vllm_config = SimpleNamespace(
            model_config=SimpleNamespace(hf_text_config=shape, get_hidden_size=lambda: 2, dtype=torch.float32),
            scheduler_config=SimpleNamespace(max_num_batched_tokens=8),
            parallel_config=SimpleNamespace(pipeline_parallel_size=1),
        )
        self.use_v2_model_runner = False
        self.model = Model()
        self.model_runner = SimpleNamespace(
            model=self.model,
            input_batch=SimpleNamespace(req_ids=["req_0_0"], num_reqs=1),
            input_ids=SimpleNamespace(gpu=torch.tensor([5, 6, 7, 0], dtype=torch.int32)),
        )

    def get_model(self) -> Model:
        return self.model

    @torch.no_grad()
    def execute_model(self, scheduler_output: Any) -> str:
        self.model(
            self.model_runner.input_ids.gpu[: scheduler_output.total_num_scheduled_tokens, None].float().expand(-1, 2)
        )
        return "output"


STEP = SimpleNamespace(
    total_num_scheduled_tokens=3,
    num_scheduled_tokens={"req_0_0": 3},
    scheduled_new_reqs=[SimpleNamespace(req_id="req_0_0", prompt_token_ids=[5, 6, 7], num_computed_tokens=0)],
    scheduled_cached_reqs=SimpleNamespace(req_ids=[], num_computed_tokens=[]),
)


@pytest.fixture
def worker(apply: Apply, monkeypatch: pytest.MonkeyPatch) -> Any:
    custom_worker = import_old_consumer("custom_worker")
    import vllm.distributed

    from vllm_overlay.compat.releases import resolve_release

    release = resolve_release(vllm.__version__, policy="strict", stands_for=None)
    monkeypatch.setattr(vllm.distributed, "get_tp_group", lambda: SimpleNamespace(rank_in_group=0))
    monkeypatch.setattr(activation._STATE, "settings", read_settings({}))
    monkeypatch.setattr(activation._STATE.ledger, "release", release)
    apply(PATCH)
    extended: Any = type("Extended", (Worker, custom_worker.HiddenStatesWorkerExtension), {})
    return extended()


def test_states_of_the_layers_asked_for_in_ascending_order(worker: Any) -> None:
    """CASES 16: their layer 0 is our 1; a model without vLLM's EAGLE-3 interface, called positionally (CASES 14)."""
    worker._setup_hidden_states_capture([3, 0])
    worker._reset_capture()
    assert worker.execute_model(STEP) == "output"
    first, last = worker._get_captured_states()
    assert first[:, 0].tolist() == [6, 7, 8]
    assert last[:, 0].tolist() == [9, 10, 11]
    assert worker._get_captured_states() is None


def test_setting_up_again_takes_the_other_layers(worker: Any) -> None:
    worker._setup_hidden_states_capture([0])
    worker._setup_hidden_states_capture(layer_ids=[1, 2])
    worker._reset_capture()
    worker.execute_model(STEP)
    second, third = worker._get_captured_states()
    assert (second[0, 0], third[0, 0]) == (7, 8)
    assert sum(len(layer._forward_hooks) for layer in worker.model.layers) == 2


def test_another_rank_captures_nothing(worker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import vllm.distributed

    monkeypatch.setattr(vllm.distributed, "get_tp_group", lambda: SimpleNamespace(rank_in_group=1))
    worker._setup_hidden_states_capture([0])
    worker._reset_capture()
    worker.execute_model(STEP)
    assert worker._get_captured_states() is None
    assert not any(layer._forward_hooks for layer in worker.model.layers)


def test_a_call_before_the_set_up_is_refused(worker: Any) -> None:
    with pytest.raises(RuntimeError, match="Must call _setup_hidden_states_capture"):
        worker._reset_capture()


def test_a_store_and_memory_at_once_are_refused(worker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activation._STATE, "settings", read_settings({"VLLM_OVERLAY_CAPTURE": "/store"}))
    with pytest.raises(activation.ActivationError, match="unset VLLM_OVERLAY_CAPTURE"):
        worker._setup_hidden_states_capture([0])


def test_stages_are_refused(worker: Any) -> None:
    worker.vllm_config.parallel_config.pipeline_parallel_size = 2
    with pytest.raises(Exception, match="pipeline_parallel_size=2"):
        worker._setup_hidden_states_capture([0])
