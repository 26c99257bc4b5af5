"""Capture in a compiled model, from a compile cache that was warmed without taps."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.live.runs import Batch, Reference, run_script
from tests.tiny_models import write_tiny_llama
from vllm_overlay.store import Store

pytestmark = [
    pytest.mark.live,
    pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile on the CPU needs g++"),
]

LAYERS = 3
BATCHES = [Batch([list(range(5, 45)), list(range(60, 71))], 16)]


def list_keys(cache: Path) -> set[str]:
    """The keys of the compiled models in vLLM's cache."""
    return {folder.parent.name for folder in (cache / "torch_compile_cache").rglob("rank_*")}


def test_a_warm_cache_made_without_taps_is_not_reused(tmp_path: Path) -> None:
    """DESIGN section 4: vLLM's compile cache does not know about us; reused, it would capture nothing.

    Nor would an engine without capture find what one with taps has left: each has a key of its own. The keys are looked
    at, for on a CPU vLLM 0.32.0 saves what it compiled and fails to load it ("no attribute 'finalize_loading'"),
    whoever made it: with one key for both, the engines compiled again and were right.
    """
    model = write_tiny_llama(tmp_path / "model", layers=LAYERS, spread=0.05)
    cache = {"VLLM_CACHE_ROOT": str(tmp_path / "cache")}
    plain = run_script(tmp_path / "plain", model, BATCHES, environment=cache, enforce_eager=False)
    keys = list_keys(tmp_path / "cache")
    assert len(keys) == 1
    capture = {"VLLM_OVERLAY": "1", "VLLM_OVERLAY_CAPTURE": str(tmp_path / "store"), "VLLM_OVERLAY_LAYERS": "0,1,3"}
    captured = run_script(tmp_path / "captured", model, BATCHES, environment=cache | capture, enforce_eager=False)
    assert len(list_keys(tmp_path / "cache") - keys) == 1
    assert [answer.token_ids for answer in captured[0]] == [answer.token_ids for answer in plain[0]]
    reference = Reference(model)
    with Store.open(tmp_path / "store") as store:
        assert len(store) == 2
        for prompt, answer in zip(BATCHES[0].prompts, captured[0], strict=True):
            record = store[answer.request_id]
            assert record.token_ids.tolist() == (prompt + answer.token_ids)[:-1]
            expected = reference.states(record.token_ids)[:, [0, 1, 3]]
            assert float((record.hidden_states - expected).abs().max()) < 1e-4
            # The row before each generated token gives that token (the states are the ones the text came from).
            chosen = reference.logits_of(record.hidden_states[len(prompt) - 1 :, 2]).argmax(-1)
            assert chosen.tolist() == answer.token_ids
