"""tools/step_cost.py plays steps that a session takes for real ones."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from vllm_overlay.store import Store

REPOSITORY = Path(__file__).parents[3]


def test_played_steps_become_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(REPOSITORY / "tools")
    costs = importlib.import_module("step_cost").measure(tmp_path / "store", 3, 5, 20)
    assert set(costs) == {"read", "plan", "send", "post", "step", "writer", "finish", "record", "flush"}
    assert min(costs.values()) > 0
    assert costs["step"] > costs["plan"]
    with Store.open(tmp_path / "store") as store:
        assert {record.request_id: len(record.token_ids) for record in store} == {
            "0-0a1b2c3d": 25,
            "1-0a1b2c3d": 26,
            "2-0a1b2c3d": 27,
        }
        assert all(record.complete for record in store)
        assert list(store.verify()) == []
