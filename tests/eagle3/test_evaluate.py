"""What `evaluate` says of a draft, from captured states; the engines that capture and serve are stood in for."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from vllm_overlay.cli.evaluate import format_report
from vllm_overlay.eagle3.acceptance import Acceptance
from vllm_overlay.eagle3.export import export_run
from vllm_overlay.eagle3.ranks import alone
from vllm_overlay.eagle3.settings import Settings
from vllm_overlay.eagle3.training import train
from vllm_overlay.offline import evaluate

FEATURES = (0, 2, 3)
RECORDS = 4


@pytest.fixture(scope="module")
def captured(make_store: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four texts of the target, with the states that the draft reads."""
    return make_store(tmp_path_factory.mktemp("captured") / "store", records=RECORDS, layer_ids=FEATURES)


@pytest.fixture
def evaluate_draft(
    captured: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., dict[str, Any]]:
    """Evaluates a draft on the texts. served: what vLLM's counters say; None where it speculates not."""
    texts = evaluate.Texts(((0,) * 12,) * RECORDS, 1.0)

    def capture(settings: object, prompts: object, layer_ids: tuple[int, ...], store: Path) -> evaluate.Texts:
        assert layer_ids == FEATURES
        shutil.copytree(captured, store)
        return texts

    def run(draft: Path, served: Acceptance | None) -> dict[str, Any]:
        monkeypatch.setattr(evaluate, "_generate_and_capture", capture)
        monkeypatch.setattr(evaluate, "can_speculate", lambda: served is not None)
        monkeypatch.setattr(evaluate, "_serve", lambda settings, prompts: (served, texts))
        settings = evaluate.EvaluationSettings(str(model_folder), draft, 3, 12, True, ())
        return evaluate.evaluate(settings, [[1]] * RECORDS)

    return run


@pytest.fixture(scope="module")
def draft(store_path: Path, model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("draft")
    settings = Settings(features=FEATURES, draft_vocab_size=128, steps=1, holdout=0)
    train([store_path], model_folder, folder / "run", settings, ranks=alone("cpu"))
    return export_run(folder / "run", folder / "draft", checkpoint="untrained")


@pytest.fixture(scope="module")
def zeroed(draft: Path) -> Path:
    """The draft with its head zeroed."""
    folder = shutil.copytree(draft, draft.with_name("zeroed"))
    tensors = load_file(str(folder / "model.safetensors"))
    tensors["lm_head.weight"] = torch.zeros_like(tensors["lm_head.weight"])
    save_file(tensors, str(folder / "model.safetensors"))
    return folder


# 3 checks of which none was accepted, as of a draft that says the same token everywhere.
NOTHING = Acceptance(3, 9, (0, 0, 0))


@pytest.mark.parametrize("served", [None, NOTHING, Acceptance(3, 9, (1, 0, 0))], ids=["no engine", "none", "one"])
def test_a_draft_whose_head_is_zeroed_is_said_to_be_so(
    evaluate_draft: Callable[..., dict[str, Any]], zeroed: Path, served: Acceptance | None
) -> None:
    """CASES 25: by its cause, whatever the target accepted of it, and not only as a low number."""
    report = evaluate_draft(zeroed, served)
    cause = "the draft's lm_head is all zeros: it proposes the same token everywhere; export it again or train it"
    assert report["problem"] == cause
    assert format_report(report).splitlines()[-1] == f"PROBLEM: {cause}"


def test_a_draft_that_the_target_accepts_is_no_problem(
    evaluate_draft: Callable[..., dict[str, Any]], draft: Path
) -> None:
    report = evaluate_draft(draft, None)
    assert report["chain"]["accepted_per_position"][0] > 0
    assert report["problem"] is None and "PROBLEM" not in format_report(report)


def test_a_draft_that_vllm_never_accepts_is_one(evaluate_draft: Callable[..., dict[str, Any]], draft: Path) -> None:
    """Where our chain accepts some, what vLLM feeds the draft is not what it was trained on."""
    report = evaluate_draft(draft, NOTHING)
    assert report["chain"]["accepted_per_position"][0] > 0
    assert "no draft token was accepted in 3 checks" in report["problem"]
