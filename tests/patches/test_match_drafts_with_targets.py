"""A draft's configuration is refused where this release would feed it other layers, or another target's."""

from __future__ import annotations

import importlib.util
import json
import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.patches.conftest import Apply
from tests.tiny_models import write_tiny_llama
from vllm_overlay.compat.releases import RELEASES, resolve_release, seam_for
from vllm_overlay.eagle3.export import vllm_config
from vllm_overlay.eagle3.match import DraftMismatchError
from vllm_overlay.fingerprint import fingerprint_model
from vllm_overlay.patches import match_drafts_with_targets
from vllm_overlay.patches.match_drafts_with_targets import PATCH

LAYERS = 8
DEFAULT = [2, 4, 5]
Configure = Callable[..., Any]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("target"), layers=LAYERS)


@pytest.fixture
def release(monkeypatch: pytest.MonkeyPatch) -> str:
    """The release installed here, as activation would say it; under the policy `strict`."""
    version = importlib.import_module("vllm").__version__
    release = resolve_release(version, policy="strict", stands_for=None)
    ledger = SimpleNamespace(release=release, vllm_version=version)
    monkeypatch.setattr(match_drafts_with_targets, "current_ledger", lambda: ledger)
    set_policy(monkeypatch, "strict")
    return release


def set_policy(monkeypatch: pytest.MonkeyPatch, policy: str) -> None:
    monkeypatch.setattr(match_drafts_with_targets, "current_settings", lambda: SimpleNamespace(policy=policy))


@pytest.fixture
def configure(apply: Apply, target: Path, release: str, tmp_path: Path) -> Configure:
    """vLLM's configuration of a draft with this config.json, to be served with this target."""
    from vllm.config import ModelConfig, ParallelConfig
    from vllm.config.speculative import SpeculativeConfig

    apply(PATCH)

    def make(config: dict[str, Any], served: Path = target) -> Any:
        draft = tmp_path / "draft"
        draft.mkdir()
        (draft / "config.json").write_text(json.dumps(config))
        return SpeculativeConfig(
            method="eagle3",
            model=str(draft),
            num_speculative_tokens=3,
            target_model_config=ModelConfig(model=str(served), dtype="float32"),
            target_parallel_config=ParallelConfig(),
        )

    return make


def describe_draft(target: Path, layer_ids: list[int]) -> dict[str, Any]:
    """config.json of a draft trained on these layers of the target."""
    shape = {
        "hidden_size": 128, "target_hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 64, "vocab_size": 128, "draft_vocab_size": 128, "rms_norm_eps": 1e-6,
        "rope_theta": 1e4, "max_position_embeddings": 512, "norm_before_residual": False, "norm_before_fc": False,
        "fc_norm": False, "norm_output": False, "style": "llama", "layer_ids": layer_ids,
    }  # fmt: skip
    of_target = {"name": str(target), "path": str(target), "bos_token_id": 1, "num_hidden_layers": LAYERS}
    fingerprint = fingerprint_model(str(target), {})
    facts = {"draft": shape, "target": of_target, "data": {"model_fingerprint": fingerprint}, "made_with": {}}
    return vllm_config(facts, "float32", step=1)


def test_what_was_trained_on_is_configured(
    configure: Configure, target: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = configure(describe_draft(target, DEFAULT))
    assert config.draft_model_config.hf_config.eagle_aux_hidden_state_layer_ids == DEFAULT
    assert [record for record in caplog.records if record.name == "vllm_overlay.eagle3"] == []


def test_layers_that_this_release_does_not_feed_are_refused(configure: Configure, target: Path, release: str) -> None:
    """0.11.0 feeds its default whatever is asked for, and those after it feed no id N before 0.18."""
    first_and_last = describe_draft(target, [1, 4, LAYERS])
    if list(RELEASES).index(release) >= list(RELEASES).index("0.18.1"):
        assert configure(first_and_last).method == "eagle3"
        return
    fed = "2, 4, 5" if release == "0.11.0" else "1, 4"
    with pytest.raises(DraftMismatchError, match=f"trained on layers 1, 4, 8 of .* would feed it layers {fed};"):
        configure(first_and_last)


def test_a_changed_config_is_refused(configure: Configure, target: Path, release: str) -> None:
    config = describe_draft(target, DEFAULT) | {"eagle_aux_hidden_state_layer_ids": [1, 4, 5]}
    if release == "0.11.0":
        assert configure(config).method == "eagle3"  # it does not read them, and feeds what the draft was trained on
        return
    with pytest.raises(DraftMismatchError, match=r"would feed it layers 1, 4, 5; its config.json was changed: set"):
        configure(config)


def test_another_target_is_refused_and_served_under_warn(
    configure: Configure,
    target: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    stranger = write_tiny_llama(tmp_path / "stranger", layers=LAYERS, seed=1)
    config = describe_draft(target, DEFAULT)
    with pytest.raises(DraftMismatchError, match=r"of the same sizes.*VLLM_OVERLAY_POLICY=warn serves it all the same"):
        configure(config, stranger)
    set_policy(monkeypatch, "warn")
    (tmp_path / "draft" / "config.json").unlink()
    (tmp_path / "draft").rmdir()
    with caplog.at_level(logging.WARNING, logger="vllm_overlay.eagle3"):
        assert configure(config, stranger).method == "eagle3"
    assert "trained on another target than" in caplog.text


def test_damaged_facts_are_refused_by_the_drafts_name(configure: Configure, target: Path, tmp_path: Path) -> None:
    config = describe_draft(target, DEFAULT)
    del config["vllm_overlay"]["target"]
    with pytest.raises(DraftMismatchError, match=f"draft {tmp_path / 'draft'}: vllm_overlay in its config.json was"):
        configure(config)


def test_a_draft_of_others_is_left_alone(configure: Configure, target: Path) -> None:
    config = describe_draft(target, [1, 4, 6])
    del config["vllm_overlay"]
    assert configure(config).method == "eagle3"


@pytest.mark.parametrize(
    ("release", "asked", "fed"),
    [
        ("0.11.0", (1, 4, 6), (2, 4, 5)),
        ("0.11.1", (1, 4, 6), (1, 4, 6)),
        ("0.11.1", (), (2, 4, 5)),
        ("0.16.0", (6, 1, 4), (1, 4, 6)),
        ("0.17.1", (0, 4, 8), (4,)),
        ("0.18.1", (0, 4, 8), (0, 4, 8)),
        ("0.32.0", (8, 4, 0), (0, 4, 8)),
        ("0.32.0", (), (2, 4, 5)),
    ],
)
def test_what_each_release_feeds(release: str, asked: tuple[int, ...], fed: tuple[int, ...]) -> None:
    assert seam_for(release).fed_layer_ids(asked, LAYERS) == fed


@pytest.mark.parametrize("release", ["0.16.0", "0.32.0"])
def test_layers_are_fed_in_ascending_order(release: str) -> None:
    assert seam_for(release).fed_layer_ids((27, 2, 15), 32) == (2, 15, 27)


def test_the_runner_reads_what_is_asked_for_where_the_seam_says_so(release: str) -> None:
    """The source of this release's runner: 0.11.0's names no such field."""
    runner = importlib.util.find_spec("vllm.v1.worker.gpu_model_runner")
    assert runner is not None and runner.origin is not None
    reads = "eagle_aux_hidden_state_layer_ids" in Path(runner.origin).read_text(encoding="utf-8")
    assert reads == (seam_for(release).fed_layer_ids((1, 4, 6), LAYERS) == (1, 4, 6))
