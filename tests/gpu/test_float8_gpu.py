"""Rows that are packed on the GPU's side stream are those that a CPU packs."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


@pytest.mark.parametrize("count", [3, 700, 2048])
def test_a_gpu_packs_as_a_cpu_does(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several steps one after the other, so that staging and packed memory are used again, in several conversions."""
    from vllm_overlay.capture import transfer
    from vllm_overlay.store import pack_rows

    monkeypatch.setattr(transfer, "SCRATCH_BYTES", 500 * 4 * 4 * 256)
    monkeypatch.setattr(transfer, "HOST_BYTES", 1 << 20)
    sizes = torch.tensor([1e-3, 1.0, 30.0, 1e4])[:, None]
    steps = [(torch.randn(2048, 4, 256) * sizes).bfloat16() for _ in range(5)]
    buffer = torch.empty_like(steps[0], device="cuda")
    tokens = torch.arange(2048, dtype=torch.int32, device="cuda")
    sender = transfer.open_transfer(buffer, "fp8")
    chosen = np.random.default_rng(0).permutation(2048)[:count]
    for number, rows in enumerate(steps):
        buffer.copy_(rows)
        indices = chosen if number % 2 else None
        arrival = sender.send(count, indices, tokens)
        buffer.zero_()
        host, wanted = arrival.wait(), rows[torch.from_numpy(chosen)] if number % 2 else rows[:count]
        assert torch.equal(host.rows, pack_rows(wanted))
        assert torch.equal(torch.from_numpy(host.peaks), wanted.float().abs().amax(-1))
        host.release()
