"""The rank of a worker is known in its process."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.patches.conftest import Apply
from tests.patches.parts import make_vllm_config
from vllm_overlay import failures
from vllm_overlay.patches.know_rank_of_worker import PATCH


def test_a_worker_says_its_rank(apply: Apply, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.worker.worker_base import WorkerBase

    monkeypatch.setattr(failures, "_RANKS", [])
    assert failures.rank_of_this_process() is None
    apply(PATCH)
    config = make_vllm_config(tmp_path)
    worker = WorkerBase(config, 0, 3, "tcp://localhost:1")
    assert (worker.rank, failures.rank_of_this_process()) == (3, 3)
    WorkerBase(vllm_config=config, local_rank=0, rank=0, distributed_init_method="")
    assert failures.rank_of_this_process() == 0
