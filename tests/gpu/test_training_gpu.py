"""Training on a GPU is the same call as on a CPU, and the loss goes the same way."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.eagle3.conftest import make_store, model_folder, reference, store_path  # noqa: F401 - fixtures
from vllm_overlay.eagle3.ranks import alone
from vllm_overlay.eagle3.settings import Settings
from vllm_overlay.eagle3.training import train

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

SETTINGS = Settings(features=(0, 2, 3), draft_vocab_size=48, steps=30, batch_tokens=128, holdout=0.2, dtype="float32")


def test_the_loss_on_a_gpu_is_the_loss_on_a_cpu(tmp_path: Path, store_path: Path, model_folder: Path) -> None:  # noqa: F811
    losses = {}
    for device in ("cpu", "cuda"):
        train([store_path], model_folder, tmp_path / device, SETTINGS, ranks=alone(device))
        lines = [json.loads(line) for line in (tmp_path / device / "metrics.jsonl").read_text().splitlines()]
        losses[device] = torch.tensor([line["loss"] for line in lines if "loss" in line and "lr" in line])
    assert len(losses["cpu"]) == SETTINGS.steps
    assert float((losses["cpu"] - losses["cuda"]).abs().max()) < 0.02
    assert losses["cuda"][-5:].mean() < 0.9 * losses["cuda"][:5].mean()


def test_sixteen_bits_train_too(tmp_path: Path, store_path: Path, model_folder: Path) -> None:  # noqa: F811
    from dataclasses import replace

    result = train(
        [store_path], model_folder, tmp_path / "run", replace(SETTINGS, dtype="bfloat16"), ranks=alone("cuda")
    )
    assert result.last_loss < result.first_loss
