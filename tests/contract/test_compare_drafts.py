"""tools/compare_drafts.py and plain_draft.py: the course of a side, and what is said of it. No side is trained here."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.contract.conftest import REPOSITORY
from vllm_overlay.eagle3.draft import DraftConfig
from vllm_overlay.eagle3.export import vllm_config
from vllm_overlay.eagle3.speculators_format import convert_to_speculators
from vllm_overlay.errors import OverlayError


@pytest.fixture
def compare_drafts(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(REPOSITORY / "tools")
    return importlib.import_module("compare_drafts")


@pytest.fixture
def sides(compare_drafts: ModuleType) -> ModuleType:
    return importlib.import_module("draft_sides")


@pytest.fixture
def work(sides: ModuleType, tmp_path: Path) -> Any:
    output = tmp_path / "output"
    output.mkdir()
    return sides.Work("target", "store", str(output), 600.0, 16384, 256, 1e-3, 6, False, ("ours", "speculators"), True)


def test_the_rate_rises_in_a_line_and_falls_to_zero(sides: ModuleType) -> None:
    parts = [0.0, 0.01, 0.025, 0.05, 0.525, 1.0, 1.1]
    assert [sides.rate_at(part) for part in parts] == pytest.approx([0.0, 0.2, 0.5, 1.0, 0.5, 0.0, 0.0])
    falling = [sides.rate_at(part / 100) for part in range(5, 101)]
    assert falling == sorted(falling, reverse=True)


def test_the_time_begins_when_all_have_ended_their_first_step(sides: ModuleType) -> None:
    met: list[str] = []
    clock = sides.SpanClock(torch.device("cpu"), 1000.0, lambda: met.append("all"))
    assert clock.began is None
    assert clock.tick() == 0.0
    assert met == ["all"]
    assert 0 < clock.tick() < 0.01
    clock.began -= 500
    assert 0.5 <= clock.tick() < 0.51
    clock.began -= 500
    with pytest.raises(sides.Enough):
        clock.tick()
    figures = clock.figures()
    assert met == ["all"]
    assert figures["steps"] == 4  # the one that was under way counts
    assert figures["seconds"] == pytest.approx(1000, abs=1)


def test_sides_wait_for_each_other(sides: ModuleType, tmp_path: Path) -> None:
    names = ("ours", "speculators")
    (tmp_path / "speculators.ready").touch()
    sides.meet(tmp_path, "ours", names)
    assert (tmp_path / "ours.ready").exists()
    sides.meet(tmp_path, "ours-flex", ())  # one after the other: for nobody
    (tmp_path / "speculators.ready").unlink()
    with pytest.raises(OverlayError, match=r"speculators has not ended its first step 0 s after ours did"):
        sides.meet(tmp_path, "ours", names, limit=0.05)
    (tmp_path / "speculators.failed").touch()
    with pytest.raises(OverlayError, match="speculators failed before the end of its first step"):
        sides.meet(tmp_path, "ours", names)


def test_losses_are_said_in_parts(sides: ModuleType) -> None:
    said = sides.describe_losses([float(number) for number in range(100, 0, -1)])
    assert (said["first_loss"], said["last_loss"]) == (100.0, 10.5)
    assert said["loss_curve"][:2] == [99.5, 97.5]
    assert len(said["loss_curve"]) == 50
    assert sides.describe_losses([3.0, 1.0])["loss_curve"] == [3.0, 1.0]


def test_ours_has_the_defaults(work: Any, sides: ModuleType) -> None:
    settings, defaults = work.settings("flex", True), sides.Settings()
    for name in ("train_head", "init", "step_weight", "ttt_steps", "learning_rate", "gradient_clip", "weight_decay"):
        assert getattr(settings, name) == getattr(defaults, name)


def test_speculators_has_its_defaults_but_for_the_data_and_the_time(work: Any, sides: ModuleType) -> None:
    flags = sides.speculators_flags(work, Path("work"), 24, on_gpu=True)
    assert {flag for flag in flags if flag.startswith("--")} == {
        "--verifier-name-or-path", "--data-path", "--save-path", "--draft-vocab-size", "--total-seq-len", "--ttt-steps",
        "--train-data-ratio", "--on-missing", "--num-workers", "--scheduler-type", "--log-freq",
        "--no-resume-from-checkpoint",
    }  # fmt: skip
    assert int(24 * float(flags[flags.index("--train-data-ratio") + 1])) == 23
    assert "eager" in sides.speculators_flags(work, Path("work"), 24, on_gpu=False)


def test_sides_are_known_and_each_is_named_once(compare_drafts: ModuleType) -> None:
    parse = partial(compare_drafts.parse_sides, known=compare_drafts.KNOWN_SIDES)
    assert parse("ours-compiled,speculators") == ("ours-compiled", "speculators")
    with pytest.raises(argparse.ArgumentTypeError, match="'specforge' is no side; there are ours, "):
        parse("ours,specforge")
    with pytest.raises(argparse.ArgumentTypeError, match="names a side twice"):
        parse("ours,ours")


SIDE = """
import json, pathlib, sys
side, folder, result = sys.argv[1], pathlib.Path(sys.argv[2]), pathlib.Path(sys.argv[3])
if side == "speculators":
    sys.exit("no memory")
output = pathlib.Path(json.loads((folder / "work.json").read_text())["output"], side)
output.mkdir()
(output / "model.safetensors").write_bytes(bytes(1 << 20))
figures = {"steps": 3, "seconds": 2.0, "seconds_until_the_first_step_ended": 7.0, "peak_memory_bytes": 3 << 30}
result.write_text(json.dumps(
    {**figures, "tokens": 300, "tokens_an_epoch": 100, "first_loss": 9.0, "last_loss": 1.0}))
"""


def test_of_a_side_that_fails_there_are_the_last_lines_and_the_other_is_kept(
    compare_drafts: ModuleType,
    sides: ModuleType,
    work: Any,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def prepare(work: Any, folder: Path, *, strict: bool) -> str:
        (folder / "work.json").write_text(json.dumps(asdict(work)))
        return "self-test: fine"

    script = tmp_path / "side.py"
    script.write_text(SIDE)
    monkeypatch.setattr(compare_drafts, "SIDES", script)
    monkeypatch.setattr(compare_drafts, "prepare", prepare)
    report = compare_drafts.compare(work, tmp_path, strict=True)
    assert report["sides"]["speculators"]["error"] == "exit status 1\nno memory"
    assert report["sides"]["ours"]["file_bytes"] == {"model.safetensors": 1 << 20}
    assert (tmp_path / "speculators.failed").exists()
    assert not (tmp_path / "ours.failed").exists()
    written = json.loads(Path(work.output, "drafts.json").read_text())
    assert written["sides"] == json.loads(json.dumps(report["sides"]))
    assert [written["work"][name] for name in ("model", "store", "output")] == ["MODEL", "STORE", "OUTPUT"]
    said = capsys.readouterr().out.splitlines()
    assert "speculators: failed: no memory" in said
    assert (
        "ours: 3 steps, 300 tokens (150 a second), 3.0 epochs in 2.0 s, loss 9.000 to 1.000, its first step after 7 s, "
        "1.0 MiB of files, 3.0 GiB of the GPU"
    ) in said


def test_folders_are_named_and_other_words_are_not(compare_drafts: ModuleType) -> None:
    flags = ["--data-path", "/w/speculators_data", "the store", "/wide"]
    named = compare_drafts.name_folders(
        {"flags": flags, "model": "/m"}, {"/w": "WORK", "/m": "MODEL", "store": "STORE"}
    )
    assert named == {"flags": ["--data-path", "WORK/speculators_data", "the store", "/wide"], "model": "MODEL"}


def test_a_store_that_is_refused_leaves_no_folder(
    compare_drafts: ModuleType, work: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def prepare(work: Any, folder: Path, *, strict: bool) -> str:
        raise OverlayError("no such store")

    monkeypatch.setattr(compare_drafts, "prepare", prepare)
    fresh = replace(work, output=str(tmp_path / "fresh"))
    with pytest.raises(OverlayError, match="no such store"):
        compare_drafts.compare_in(tmp_path / "work", fresh, strict=True)
    assert not (tmp_path / "fresh").exists() and not (tmp_path / "work").exists()


@pytest.fixture
def target() -> Any:
    """As much of one as the conversion asks for."""
    from types import SimpleNamespace

    config = SimpleNamespace(bos_token_id=1, num_hidden_layers=8)
    return SimpleNamespace(config=config, embed_tokens=torch.rand(96, 32))


SHAPE = DraftConfig(
    hidden_size=32, target_hidden_size=32, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
    intermediate_size=64, vocab_size=96, draft_vocab_size=48, rms_norm_eps=1e-5, rope_theta=5e4,
    max_position_embeddings=256, norm_before_residual=True, layer_ids=(2, 4, 5), norm_before_fc=True, norm_output=True,
)  # fmt: skip


def test_the_plain_form_of_a_speculators_draft_is_the_one_it_came_from(
    compare_drafts: ModuleType, target: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain_draft = importlib.import_module("plain_draft")
    monkeypatch.setattr("vllm_overlay.eagle3.export.sample_embeddings", lambda *args: (0.5,))
    training_sides = sys.modules["training_sides"]
    facts = training_sides.describe_draft(SHAPE, target, "model")
    plain = vllm_config(facts, "bfloat16", step=0)
    tensors = {"fc.weight": torch.rand(32, 96).bfloat16(), "midlayer.mlp.up_proj.weight": torch.rand(64, 32)}
    config, theirs = convert_to_speculators(plain, tensors, facts)
    theirs["embed_tokens.weight"] = target.embed_tokens.bfloat16()
    found, names = plain_draft.convert(config, theirs, target, "model")
    assert found == plain
    assert names.keys() == tensors.keys()
    theirs["embed_tokens.weight"] = theirs["embed_tokens.weight"] + 1
    with pytest.raises(OverlayError, match="embeddings are not the target's"):
        plain_draft.convert(config, theirs, target, "model")


def test_a_draft_of_several_layers_has_no_plain_form(compare_drafts: ModuleType, target: Any) -> None:
    plain_draft = importlib.import_module("plain_draft")
    layer = {"model_type": "llama", "num_hidden_layers": 2}
    with pytest.raises(OverlayError, match="a draft of 2 layers"):
        plain_draft.read_shape({"transformer_layer_config": layer})
