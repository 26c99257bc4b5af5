"""SmolLM2-135M-Instruct, a real model: every captured state of prompts and generated text is transformers'."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.live.runs import Batch, Reference, run_script
from tools.smollm2 import build_checkpoint, default_folder, is_current
from vllm_overlay.store import Store

pytestmark = pytest.mark.live

# States of this model reach 3e4 in single channels of the middle layers: float32 rounding is relative to that.
RELATIVE_TOLERANCE = 1e-4


def test_every_state_of_a_real_model(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    model = default_folder()
    if not is_current(model):
        build_checkpoint(model)
    tokenizer = AutoTokenizer.from_pretrained(str(model))
    questions = ["The capital of France is", "Water boils at", "def fibonacci(n):\n"]
    prompts = [tokenizer(question)["input_ids"] for question in questions]
    environment = {"VLLM_OVERLAY": "1", "VLLM_OVERLAY_CAPTURE": str(tmp_path / "store"), "VLLM_OVERLAY_LAYERS": "all"}
    answers = run_script(tmp_path / "run", model, [Batch(prompts, 12)], environment=environment)[0]
    assert "Paris" in tokenizer.decode(answers[0].token_ids)
    reference = Reference(model)
    with Store.open(tmp_path / "store") as store:
        assert store.layer_ids == tuple(range(31))
        assert len(store) == len(prompts)
        for prompt, answer in zip(prompts, answers, strict=True):
            record = store[answer.request_id]
            assert record.token_ids.tolist() == (prompt + answer.token_ids)[:-1]
            expected = reference.states(record.token_ids)
            difference = (record.hidden_states - expected).abs().amax(dim=(0, 2))
            size = expected.abs().amax(dim=(0, 2))
            print(
                f"largest difference {float(difference.max()):.2e}, "
                f"of a layer's largest {float((difference / size).max()):.2e}"
            )
            assert float((difference / size).max()) < RELATIVE_TOLERANCE
            # Read back through the head, the last states are the text: argmax of lm_head(norm(state N)).
            chosen = reference.logits_of(record.hidden_states[len(prompt) - 1 :, 30]).argmax(-1)
            assert chosen.tolist() == answer.token_ids
