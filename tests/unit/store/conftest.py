"""Small stores: 3 layers of width 8, so that a row of float32 is 96 bytes."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from vllm_overlay.store import PendingRecord, StoreMeta

MakeMeta = Callable[..., StoreMeta]
MakeRecord = Callable[..., PendingRecord]
MakeRows = Callable[..., torch.Tensor]


@pytest.fixture
def make_meta() -> MakeMeta:
    def make(**changes: object) -> StoreMeta:
        facts: dict[str, object] = {
            "layer_ids": (2, 1, 6),
            "hidden_size": 8,
            "dtype": "float32",
            "num_hidden_layers": 6,
            "model": "tiny-llama",
            "model_fingerprint": "f00d",
            "vllm_version": "0.32.0",
            "runner": "V2",
        }
        return StoreMeta(**{**facts, **changes})  # type: ignore[arg-type]

    return make


@pytest.fixture
def meta(make_meta: MakeMeta) -> StoreMeta:
    return make_meta()


@pytest.fixture
def make_rows() -> MakeRows:
    """Rows `[count, 3, 8]` of which no two are equal; `seed` keeps those of several calls apart."""

    def make(count: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
        return torch.randn(count, 3, 8, generator=torch.Generator().manual_seed(seed)).to(dtype)

    return make


@pytest.fixture
def make_record() -> MakeRecord:
    def make(request_id: str, rows: list[int] | range, **changes: object) -> PendingRecord:
        numbers = np.asarray(rows, dtype=np.int64)
        facts: dict[str, object] = {
            "request_id": request_id,
            "token_ids": np.arange(100, 100 + len(numbers), dtype=np.int64),
            "rows": numbers,
            "num_prompt_tokens": 1,
            "complete": bool((numbers >= 0).all()),
            "finish_reason": "length",
            "tag": None,
            "loss_mask": None,
        }
        return PendingRecord(**{**facts, **changes})  # type: ignore[arg-type]

    return make


@pytest.fixture
def store_path(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def open_shards(store_path: Path) -> Callable[[], int]:
    """How many shards of the store this process has open."""

    def count() -> int:
        targets = [os.fspath(entry.readlink()) for entry in Path("/proc/self/fd").iterdir() if entry.exists()]
        return sum(target.startswith(str(store_path)) and target.endswith(".safetensors") for target in targets)

    return count
