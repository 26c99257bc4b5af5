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


def test_played_steps_may_write_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each request, the last position of the prompt; the decode steps that are measured have none."""
    monkeypatch.syspath_prepend(REPOSITORY / "tools")
    costs = importlib.import_module("step_cost").measure(tmp_path / "store", 3, 5, 20, "last")
    assert set(costs) == {"read", "plan", "step", "writer", "finish", "record", "flush"}
    with Store.open(tmp_path / "store") as store:
        assert {record.request_id: (record.first_position, len(record.token_ids)) for record in store} == {
            "0-0a1b2c3d": (4, 1),
            "1-0a1b2c3d": (5, 1),
            "2-0a1b2c3d": (6, 1),
        }
