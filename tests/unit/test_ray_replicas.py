"""A replica of Ray, without Ray and without an engine: what it computes of the batches that it is given."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from vllm_overlay.dataset import DatasetItem, write_dataset
from vllm_overlay.offline import capture, ray_replicas
from vllm_overlay.offline.ray_replicas import EnginePlan, EngineReplica
from vllm_overlay.store import PendingRecord, Store, StoreMeta, StoreWriter, find_stores

META = StoreMeta((1,), 4, "float32", 2, "toy", "0123", "0.16.0", "V1")


class WritingEngine:
    """Writes the records of the items that it is given."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.llm_engine = SimpleNamespace(model_config=SimpleNamespace(max_model_len=100))

    def collective_rpc(self, method: str) -> list[dict[str, int]]:
        return [{"bytes": 0}]

    def capture(self, items: Sequence[DatasetItem]) -> None:
        with StoreWriter.open(self.folder, META) as writer:
            for item in items:
                length = len(item.token_ids)
                rows = writer.append(torch.ones(length, 1, 4)) + np.arange(length)
                writer.commit([PendingRecord("r", item.token_ids, rows, length, True, "length", item.key, None)])


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EnginePlan:
    items = [DatasetItem(f"i{i}", np.arange(2 + i), np.ones(2 + i, dtype=np.bool_)) for i in range(6)]
    write_dataset(tmp_path / "data", items, {})
    monkeypatch.setattr(EngineReplica, "_start_engine", lambda replica, plan: WritingEngine(replica._folder))
    monkeypatch.setattr(EngineReplica, "__del__", lambda replica: None)
    monkeypatch.setattr(ray_replicas, "capture_group", WritingEngine.capture)
    return EnginePlan(str(tmp_path / "data"), "toy", str(tmp_path / "store"), "1", "auto", ())


def start(plan: EnginePlan, monkeypatch: pytest.MonkeyPatch, actor: str = "a0", node: str = "n0") -> EngineReplica:
    context = SimpleNamespace(get_actor_id=lambda: actor, get_node_id=lambda: node)
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(get_runtime_context=lambda: context))
    return EngineReplica(plan)


def read_tags(plan: EnginePlan) -> list[str]:
    with Store.open(plan.store) as opened:
        return sorted(str(record.tag) for record in opened)


def test_a_replica_reads_its_store_once_and_not_for_each_batch(
    plan: EnginePlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    start(plan, monkeypatch)({"data": np.array([0, 1])})
    again = start(plan, monkeypatch)  # after it was lost
    opened: list[Path] = []

    def note(path: Path) -> Store:
        opened.append(path)
        return Store(path)

    monkeypatch.setattr(capture, "Store", note)
    for batch in ([0, 1, 2], [3], [3, 4]):  # Ray gives a batch anew if its answer was lost
        again({"data": np.array(batch)})
    assert opened == []
    assert read_tags(plan) == ["i0", "i1", "i2", "i3", "i4"]


def test_a_replica_that_is_started_again_on_another_node_leaves_the_old_folder_alone(
    plan: EnginePlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that Ray lost may still write: an index is written by one machine at a time."""
    start(plan, monkeypatch, actor="a0", node="n0")({"data": np.array([0, 1])})
    start(plan, monkeypatch, actor="a0", node="n1")({"data": np.array([0, 1, 2])})
    start(plan, monkeypatch, actor="a1", node="n1")({"data": np.array([3])})
    start(plan, monkeypatch, actor="a0", node="n0")({"data": np.array([2, 4])})
    held = {path.name: len(Store(path)) for path in find_stores(Path(plan.store))}
    assert held == {"replica-ray-a0-n0": 3, "replica-ray-a0-n1": 1, "replica-ray-a1-n1": 1}
    assert read_tags(plan) == ["i0", "i1", "i2", "i3", "i4"]


def test_a_replica_does_not_open_what_another_one_may_be_writing(
    plan: EnginePlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = Path(plan.store) / "replica-ray-a1-n1"
    other.mkdir(parents=True)
    (other / "index.sqlite").write_text("in the middle of a write")
    start(plan, monkeypatch, actor="a0", node="n0")({"data": np.array([0])})
    assert len(Store(Path(plan.store) / "replica-ray-a0-n0")) == 1
