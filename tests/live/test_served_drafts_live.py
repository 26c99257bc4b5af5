"""A draft of ours in both formats, served by an engine that proposes three tokens at a time, where a CPU can.

`tools/matrix.py` runs it in the environment of each release; it is a cell of the table in README.md.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from packaging.specifiers import SpecifierSet

from tests.live.runs import ENGINE, Reference, make_prompt, overlay_environment, run_python
from tests.tiny_models import write_tiny_llama
from vllm_overlay.eagle3.acceptance import Acceptance, load_draft, measure_acceptance, pool
from vllm_overlay.eagle3.export import FORMATS, export_run
from vllm_overlay.eagle3.ranks import alone
from vllm_overlay.eagle3.settings import Settings
from vllm_overlay.eagle3.target import load_target
from vllm_overlay.eagle3.training import train
from vllm_overlay.fingerprint import fingerprint_model
from vllm_overlay.store import PendingRecord, StoreMeta, StoreWriter

pytestmark = pytest.mark.live

SCRIPT = Path(__file__).parent / "scripts" / "serve_exported.py"
VLLM = metadata.version(metadata.packages_distributions()["vllm"][0])

# What vLLM's own code dies of where it cannot serve a draft on a CPU.
CANNOT_SPECULATE = {
    SpecifierSet("<0.20"): "AssertionError: spec decode is not supported.",
    # It asks the target for no features.
    SpecifierSet(">=0.20,<0.22"): "ValueError: too many values to unpack (expected 2)",
    SpecifierSet(">=0.23,<0.25"): (
        "TypeError: _sample_recovered_tokens_kernel_impl() got an unexpected keyword argument 'USE_FP64_GUMBEL'"
    ),
    SpecifierSet("==0.30.*"): "TypeError: Cannot inspect kernel parameters for function",
}
# 0.11.0 feeds layers 2, N//2 and N-3, whatever a draft asks for: these are three.
DRAFTED_LAYERS, FEATURES = 8, (2, 4, 5)
PROMPT_LENGTH, NEW_TOKENS = 8, 40


@dataclass(frozen=True)
class Exported:
    """A target, texts that it wrote, a draft of it by format, and what that foresees of the texts, counted in torch."""

    model: Path
    texts: torch.Tensor
    drafts: dict[str, Path]
    chain: Acceptance


def write_texts(reference: Reference, count: int) -> torch.Tensor:
    """Prompts of random tokens and what the target says next, `[count, tokens]`."""
    prompts = torch.tensor([make_prompt(300 + i, PROMPT_LENGTH) for i in range(count)])
    length = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS}
    texts: torch.Tensor = reference.model.generate(
        prompts, attention_mask=torch.ones_like(prompts), do_sample=False, eos_token_id=None, pad_token_id=0, **length
    )
    return texts


def store_states(folder: Path, model: Path, reference: Reference, texts: torch.Tensor) -> Path:
    layer_ids = (*FEATURES, DRAFTED_LAYERS)
    config = json.loads((model / "config.json").read_text())
    fingerprint = fingerprint_model(str(model), config)
    meta = StoreMeta(
        layer_ids, config["hidden_size"], "float32", DRAFTED_LAYERS, str(model), fingerprint, VLLM, "transformers"
    )
    with StoreWriter.open(folder, meta) as writer:
        for number, text in enumerate(texts):
            first = writer.append(reference.states(text)[:, list(layer_ids)].contiguous())
            rows = np.arange(first, first + len(text), dtype=np.int64)
            writer.commit([PendingRecord(f"r{number}", text.numpy(), rows, PROMPT_LENGTH, True, "length", None, None)])
    return folder


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    folder = tmp_path_factory.mktemp("exported")
    model = write_tiny_llama(folder / "model", layers=DRAFTED_LAYERS, spread=0.05)
    reference = Reference(model)
    texts = write_texts(reference, 24)
    store = store_states(folder / "store", model, reference, texts)
    settings = Settings(features=FEATURES, draft_vocab_size=96, steps=12, batch_tokens=512, learning_rate=2e-3)
    train([store], model, folder / "run", settings, ranks=alone("cpu"))
    drafts = {name: export_run(folder / "run", folder / name, checkpoint="last", format=name) for name in FORMATS}
    draft = load_draft(drafts["vllm"], load_target(model).embed_tokens)
    chain = pool(
        measure_acceptance(draft, reference.states(text)[:, list(FEATURES)], text, PROMPT_LENGTH, 3) for text in texts
    )
    return Exported(model, texts, drafts, chain)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, exported: Exported) -> dict[str, Any]:
    """What `scripts/serve_exported.py` found."""
    folder = tmp_path_factory.mktemp("served")
    plan, out = folder / "plan.json", folder / "out.json"
    content = {
        "engine": ENGINE | {"model": str(exported.model)},
        "drafts": {name: str(draft) for name, draft in exported.drafts.items()},
        "prompts": exported.texts[:, :PROMPT_LENGTH].tolist(),
        # The chain counts checks whose three tokens lie inside the text; vLLM's last check has its first token inside.
        "max_tokens": [NEW_TOKENS - 2] * len(exported.texts),
        "out": str(out),
    }
    plan.write_text(json.dumps(content))
    environment = overlay_environment() | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    done = run_python([str(SCRIPT), str(plan)], environment)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def test_a_draft_of_ours_is_served(
    served: dict[str, Any], exported: Exported, record_property: Callable[[str, object], None]
) -> None:
    """In both formats: the target's own text, and the checks and accepted tokens that the chain in torch counts."""
    plain = served["alone"]["token_ids"]
    assert plain == exported.texts[:, PROMPT_LENGTH:-2].tolist()
    by_draft = [served[name] for name in FORMATS]
    known = next((error for releases, error in CANNOT_SPECULATE.items() if VLLM in releases), None)
    if known:
        assert [known in one.get("error", "") for one in by_draft] == [True] * len(FORMATS), by_draft
        pytest.skip(known)
    accepted = list(exported.chain.accepted_per_position)
    assert accepted[-1] > 0
    expected = {
        "token_ids": plain,
        "num_drafts": exported.chain.num_drafts,
        "num_draft_tokens": 3 * exported.chain.num_drafts,
        "accepted_per_position": accepted,
    }
    assert by_draft == [expected] * len(FORMATS)
    counts = f"{exported.chain.num_drafts} times 3 tokens proposed, accepted {', '.join(map(str, accepted))}"
    record_property("a draft of ours served, k=3", counts)
