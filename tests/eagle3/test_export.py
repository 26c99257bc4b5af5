"""The exported checkpoint: exactly the tensors and the config that vLLM's draft class reads."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from packaging.version import Version
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoConfig, Qwen3Config, Qwen3ForCausalLM

from vllm_overlay.eagle3.acceptance import load_draft
from vllm_overlay.eagle3.export import export_run, read_draft_config
from vllm_overlay.eagle3.initialisation import create_draft, draft_config
from vllm_overlay.eagle3.ranks import alone
from vllm_overlay.eagle3.run_folder import RunFolder
from vllm_overlay.eagle3.settings import Settings
from vllm_overlay.eagle3.target import load_target
from vllm_overlay.eagle3.training import train
from vllm_overlay.eagle3.vocabulary import DraftVocabulary
from vllm_overlay.errors import OverlayError

SETTINGS = Settings(features=(0, 2, 3), draft_vocab_size=16, steps=6, batch_tokens=64, holdout=0.2, checkpoint_every=2)
LAYER = {
    f"midlayer.{name}.weight"
    for name in (
        "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj",
        "mlp.down_proj", "input_layernorm", "hidden_norm", "post_attention_layernorm",
    )
}  # fmt: skip
ALWAYS = LAYER | {"fc.weight", "norm.weight", "lm_head.weight"}


@pytest.fixture(scope="module")
def run(store_path: Path, model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "run"
    train([store_path], model_folder, path, SETTINGS, ranks=alone("cpu"))
    return path


@pytest.fixture
def run_with(store_path: Path, model_folder: Path, tmp_path: Path) -> Callable[..., Path]:
    def make(**changes: object) -> Path:
        train([store_path], model_folder, tmp_path / "run", replace(SETTINGS, steps=2, **changes), ranks=alone("cpu"))
        return tmp_path / "run"

    return make


def test_a_reduced_vocabulary(run: Path, tmp_path: Path) -> None:
    """The head is [16, H]; the map is an offset; the target's embeddings are not in the file."""
    output = export_run(run, tmp_path / "draft")
    assert {path.name for path in output.iterdir()} == {"config.json", "model.safetensors"}
    tensors = load_file(str(output / "model.safetensors"))
    assert set(tensors) == ALWAYS | {"d2t", "t2d"}
    assert tensors["lm_head.weight"].shape == (16, 32)
    assert tensors["fc.weight"].shape == (32, 96)
    assert tensors["midlayer.self_attn.q_proj.weight"].shape == (32, 64)
    assert tensors["d2t"].dtype == torch.int64 and tensors["t2d"].dtype == torch.bool
    assert (torch.arange(16) + tensors["d2t"]).tolist() == tensors["t2d"].nonzero()[:, 0].tolist()
    with safe_open(str(output / "model.safetensors"), framework="pt") as file:
        assert file.metadata() == {"format": "pt"}


@pytest.mark.parametrize("format", ["vllm", "speculators"])
def test_a_reduced_vocabulary_of_a_tied_target(
    store_path: Path, model_folder: Path, edit_checkpoint: Callable[..., Path], tmp_path: Path, format: str
) -> None:
    """CASES 29: of 128 tied embeddings and a draft vocabulary of 16, the reloaded head is the kept rows, [16, H]."""
    tensors = load_file(str(model_folder / "model.safetensors"))
    del tensors["lm_head.weight"]
    tied = edit_checkpoint(lambda config: config.update(tie_word_embeddings=True), tensors)
    settings = replace(SETTINGS, steps=1)
    train([store_path], tied, tmp_path / "run", settings, ranks=alone("cpu"), self_test="off")
    output = export_run(tmp_path / "run", tmp_path / "draft", checkpoint="untrained", format=format)
    embeddings = tensors["model.embed_tokens.weight"]
    kept = load_file(str(tmp_path / "run" / "vocabulary.safetensors"))["t2d"]
    head = load_file(str(output / "model.safetensors"))["lm_head.weight"]
    assert embeddings.shape == (128, 32) and head.shape == (16, 32)
    assert torch.equal(head, embeddings[kept])
    assert json.loads((output / "config.json").read_text())["tie_word_embeddings"] is False
    if format == "vllm":
        loaded = load_draft(output, embeddings)
        assert torch.equal(loaded.draft.lm_head.weight, head)
        assert loaded.target_ids.tolist() == kept.nonzero()[:, 0].tolist()


def test_a_full_vocabulary_has_no_map(run_with: Callable[..., Path], tmp_path: Path) -> None:
    output = export_run(run_with(draft_vocab_size=128), tmp_path / "draft")
    assert set(load_file(str(output / "model.safetensors"))) == ALWAYS
    assert json.loads((output / "config.json").read_text())["draft_vocab_size"] == 128


def test_a_narrow_draft_brings_its_embeddings(run_with: Callable[..., Path], tmp_path: Path) -> None:
    """CASES 31."""
    output = export_run(run_with(hidden_size=16), tmp_path / "draft")
    tensors = load_file(str(output / "model.safetensors"))
    assert set(tensors) == ALWAYS | {"d2t", "t2d", "embed_tokens.weight"}
    assert tensors["fc.weight"].shape == (16, 96) and tensors["embed_tokens.weight"].shape == (128, 16)
    config = json.loads((output / "config.json").read_text())
    assert (config["hidden_size"], config["target_hidden_size"]) == (16, 32)


def test_other_norms_are_in_the_file_and_in_the_config(run_with: Callable[..., Path], tmp_path: Path) -> None:
    """By the names that vLLM's draft class reads; a draft without them, as the others here, says nothing of them."""
    norms = {"norm_before_fc": True, "fc_norm": True, "norm_output": True}
    output = export_run(run_with(**norms), tmp_path / "draft")
    tensors = load_file(str(output / "model.safetensors"))
    assert set(tensors) == ALWAYS | {"d2t", "t2d", "input_norm.weight"} | {f"fc_norm.{n}.weight" for n in range(3)}
    assert tensors["input_norm.weight"].shape == (96,) and tensors["fc_norm.2.weight"].shape == (32,)
    config = json.loads((output / "config.json").read_text())
    assert norms.items() <= config.items()
    assert asdict(read_draft_config(config)).items() >= norms.items()


QWEN3_NORMS = {f"midlayer.self_attn.{name}.weight" for name in ("q_norm", "k_norm")}


def test_a_qwen3_draft(run_with: Callable[..., Path], model_folder: Path, tmp_path: Path) -> None:
    """By the names of vLLM's own Qwen3 attention, and as transformers' Qwen3 config; it loads again as trained."""
    path = run_with(style="qwen3")
    output = export_run(path, tmp_path / "draft", checkpoint="last", dtype="float32")
    tensors = load_file(str(output / "model.safetensors"))
    assert set(tensors) == ALWAYS | QWEN3_NORMS | {"d2t", "t2d"}
    assert all(tensors[name].shape == (8,) for name in QWEN3_NORMS)
    config = AutoConfig.from_pretrained(output)
    assert type(config).__name__ == "Qwen3Config" and config.architectures == ["Eagle3Qwen3ForCausalLM"]
    assert (config.head_dim, config.hidden_size, config.num_key_value_heads) == (8, 32, 2)
    assert config.rope_parameters["rope_theta"] == 10000.0 and not config.attention_bias
    loaded = load_draft(output, load_target(model_folder).embed_tokens)
    trained = load_file(str(RunFolder.open(path).find_checkpoint("last") / "draft.safetensors"))
    assert loaded.draft.config.style == "qwen3" and trained.keys() == loaded.draft.state_dict().keys()
    assert all(torch.equal(trained[name], tensor) for name, tensor in loaded.draft.state_dict().items())


def test_a_qwen3_target_gives_the_draft_its_norms(tmp_path: Path) -> None:
    config = Qwen3Config(
        vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, tie_word_embeddings=False,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config)
    attention = model.model.layers[1].self_attn
    for norm in (attention.q_norm, attention.k_norm):
        torch.nn.init.uniform_(norm.weight, 0.5, 1.5)
    model.save_pretrained(tmp_path)
    target = load_target(tmp_path)
    shape = draft_config(target.config, (0, 1, 2), 128, style="qwen3")
    draft = create_draft(shape, target, DraftVocabulary(torch.arange(128), 128), "target", seed=0)
    assert torch.equal(draft.midlayer.self_attn.q_norm.weight, attention.q_norm.weight)
    assert torch.equal(draft.midlayer.self_attn.k_norm.weight, attention.k_norm.weight)
    assert torch.equal(draft.midlayer.self_attn.q_proj.weight[:, 32:], attention.q_proj.weight)
    plain = create_draft(replace(shape, style="llama"), target, DraftVocabulary(torch.arange(128), 128), "target", 0)
    assert not QWEN3_NORMS & plain.state_dict().keys()


def test_the_config_means_the_same_to_transformers_4_and_5(run: Path, tmp_path: Path) -> None:
    output = export_run(run, tmp_path / "draft")
    config = AutoConfig.from_pretrained(output)
    assert type(config).__name__ == "LlamaConfig"
    assert config.architectures == ["LlamaForCausalLMEagle3"]
    assert (config.num_hidden_layers, config.vocab_size, config.draft_vocab_size) == (1, 128, 16)
    assert config.eagle_aux_hidden_state_layer_ids == [0, 2, 3]
    assert config.rope_parameters["rope_theta"] == 10000.0 and config.rope_parameters["rope_type"] == "default"
    assert not {"norm_before_fc", "fc_norm", "norm_output"} & json.loads((output / "config.json").read_text()).keys()
    assert config.norm_before_residual is False and config.tie_word_embeddings is False
    assert config.dtype == torch.float32
    written = json.loads((output / "config.json").read_text())
    assert written["rope_theta"] == 10000.0
    facts = written["vllm_overlay"]
    assert facts["target_fingerprint"] == "tiny" and facts["layer_ids"] == [0, 2, 3]
    assert facts["trained_steps"] == RunFolder.open(run).pointer("best")


def test_checkpoints_can_be_chosen(run: Path, model_folder: Path, tmp_path: Path) -> None:
    heads = {}
    for which in ("untrained", "last", "4"):
        output = export_run(run, tmp_path / which, checkpoint=which, dtype="float32")
        heads[which] = load_file(str(output / "model.safetensors"))["lm_head.weight"]
    kept = load_file(str(run / "vocabulary.safetensors"))["t2d"]
    assert torch.equal(heads["untrained"], load_target(model_folder).lm_head[kept])
    assert not torch.equal(heads["untrained"], heads["last"]) and not torch.equal(heads["4"], heads["last"])
    with pytest.raises(OverlayError, match=r"no checkpoint of step 3; there are \[0, "):
        export_run(run, tmp_path / "none", checkpoint="3")
    with pytest.raises(OverlayError, match="best, last, untrained or a step"):
        export_run(run, tmp_path / "none", checkpoint="newest")
    assert not (tmp_path / "none").exists()


def test_the_file_is_in_the_targets_dtype_unless_asked(run: Path, tmp_path: Path) -> None:
    output = export_run(run, tmp_path / "half", dtype="bfloat16")
    tensors = load_file(str(output / "model.safetensors"))
    assert tensors["fc.weight"].dtype == torch.bfloat16 and tensors["d2t"].dtype == torch.int64
    assert json.loads((output / "config.json").read_text())["torch_dtype"] == "bfloat16"


def test_a_used_folder_is_refused(run: Path, tmp_path: Path) -> None:
    (tmp_path / "used").mkdir()
    export_run(run, tmp_path / "used")  # empty is fine
    with pytest.raises(OverlayError, match="is not empty"):
        export_run(run, tmp_path / "used")
    assert [path.name for path in tmp_path.iterdir()] == ["used"]


def test_an_exported_draft_is_the_trained_one(run: Path, model_folder: Path, tmp_path: Path) -> None:
    output = export_run(run, tmp_path / "draft", checkpoint="last", dtype="float32")
    target = load_target(model_folder)
    loaded = load_draft(output, target.embed_tokens)
    trained = load_file(str(RunFolder.open(run).find_checkpoint("last") / "draft.safetensors"))
    assert all(torch.equal(trained[name], tensor) for name, tensor in loaded.draft.state_dict().items())
    assert loaded.target_ids.tolist() == load_file(str(run / "vocabulary.safetensors"))["t2d"].nonzero()[:, 0].tolist()
    with pytest.raises(OverlayError, match="a vocabulary of 128, the model has 100"):
        load_draft(output, target.embed_tokens[:100])
    with pytest.raises(OverlayError, match="no exported draft here"):
        load_draft(run, target.embed_tokens)


def test_the_form_of_speculators(run: Path, tmp_path: Path) -> None:
    """Names and fields as speculators 0.9 writes them; nothing is left to a default that readers differ on."""
    plain, output = export_run(run, tmp_path / "plain"), export_run(run, tmp_path / "draft", format="speculators")
    tensors, named_by_us = (load_file(str(path / "model.safetensors")) for path in (output, plain))
    assert set(tensors) == {name.replace("midlayer", "layers.0") for name in ALWAYS} | {"d2t", "t2d"}
    assert all(torch.equal(named_by_us[name.replace("layers.0", "midlayer")], kept) for name, kept in tensors.items())
    config = json.loads((output / "config.json").read_text())
    assert (config["speculators_model_type"], config["architectures"]) == ("eagle3", ["Eagle3Speculator"])
    assert config["norm_before_residual"] is False and config["eagle_aux_hidden_state_layer_ids"] == [0, 2, 3]
    assert (config["draft_vocab_size"], config["target_hidden_size"]) == (16, 32)
    layer = config["transformer_layer_config"]
    assert (layer["model_type"], layer["vocab_size"], layer["num_hidden_layers"]) == ("llama", 128, 1)
    assert config["tie_word_embeddings"] is False and layer["tie_word_embeddings"] is False
    assert layer["vllm_overlay"] == config["vllm_overlay"]
    assert config["speculators_config"] == {
        "algorithm": "eagle3",
        "default_proposal_method": "greedy",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": SETTINGS.ttt_steps}],
        "verifier": {"name_or_path": "tiny", "architectures": ["LlamaForCausalLM"]},
    }


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"hidden_size": 16}, "--hidden-size 16: the target's hidden size is 32"),
        ({"norm_before_fc": True, "fc_norm": True}, "--norm-before-fc and --fc-norm"),
    ],
)
def test_what_speculators_cannot_hold_is_refused(
    run_with: Callable[..., Path], tmp_path: Path, changes: dict[str, object], named: str
) -> None:
    with pytest.raises(OverlayError, match=named):
        export_run(run_with(**changes), tmp_path / "draft", format="speculators")
    assert not (tmp_path / "draft").exists()


def test_a_format_that_is_none_is_refused(run: Path, tmp_path: Path) -> None:
    with pytest.raises(OverlayError, match="format 'gguf': expected vllm or speculators"):
        export_run(run, tmp_path / "draft", format="gguf")
    assert not (tmp_path / "draft").exists()


@pytest.mark.parametrize("changes", [{}, {"norm_before_residual": True, "fc_norm": True, "norm_output": True}])
def test_vllm_reads_of_it_what_the_plain_form_says(
    run_with: Callable[..., Path], tmp_path: Path, changes: dict[str, object]
) -> None:
    parser = pytest.importorskip("vllm.transformers_utils.configs.speculators.base").SpeculatorsConfig
    path = run_with(**changes)
    plain = json.loads((export_run(path, tmp_path / "plain") / "config.json").read_text())
    output = export_run(path, tmp_path / "draft", format="speculators")
    config = parser.from_pretrained(str(output))
    assert config.architectures == ["Eagle3LlamaForCausalLM"] and config.target_hidden_size == 32
    for name in (
        "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size",
        "draft_vocab_size", "rms_norm_eps", "norm_before_residual", "vllm_overlay",
    ):  # fmt: skip
        assert getattr(config, name) == plain[name], name
    assert getattr(config, "eagle_aux_hidden_state_layer_ids", [0, 2, 3]) == [0, 2, 3]  # 0.11.0 drops them
    written = json.loads((output / "config.json").read_text())
    assert {name: written[name] for name in changes} == changes
    assert parser.extract_vllm_speculative_config(written)["num_speculative_tokens"] == SETTINGS.ttt_steps


def test_vllm_has_a_class_for_a_qwen3_draft_from_0_24_on(run_with: Callable[..., Path], tmp_path: Path) -> None:
    """By its registry for the plain form, by its parser for speculators'; releases without one do not load either."""
    registry = pytest.importorskip("vllm.model_executor.models.registry")
    parser = pytest.importorskip("vllm.transformers_utils.configs.speculators.base").SpeculatorsConfig
    path = run_with(style="qwen3")
    (architecture,) = json.loads((export_run(path, tmp_path / "plain") / "config.json").read_text())["architectures"]
    has_class = importlib.util.find_spec("vllm.model_executor.models.qwen3_eagle3") is not None
    assert has_class == (Version(importlib.import_module("vllm").__version__).release >= (0, 24))
    assert (architecture in registry.ModelRegistry.get_supported_archs()) == has_class
    config = parser.from_pretrained(str(export_run(path, tmp_path / "draft", format="speculators")))
    assert config.architectures == ["Eagle3Qwen3ForCausalLM" if has_class else "Eagle3LlamaForCausalLM"]
