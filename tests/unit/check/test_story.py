"""The story replayed: what a model died of after 18 minutes is a line that fails (CASES 21 to 24)."""

from __future__ import annotations

from tests.unit.check.conftest import DEEPSEEK, LLAMA, ReplaceFiles, WriteConfig
from vllm_overlay.check.line import Line
from vllm_overlay.check.report import Plan, check
from vllm_overlay.source.vllm_source import VllmSource

DEEPSEEK_FILE = "vllm/model_executor/models/deepseek_v2.py"
LLAMA_FILE = "vllm/model_executor/models/llama.py"
DEEPSEEK_V3 = {**DEEPSEEK, "architectures": ["DeepseekV3ForCausalLM"]}


def alter(source: VllmSource, file: str, old: str, new: str) -> dict[str, str]:
    text = source.files[file]
    assert old in text
    return {file: text.replace(old, new)}


def only_failing(folder: object, environ: dict[str, str] | None = None, **plan: object) -> Line:
    (line,) = check(Plan(folder, **plan), environ or {}).failing  # type: ignore[arg-type]
    return line


def find_loop(source: VllmSource, file: str, variable: str = "layer") -> str:
    """The call of the layers in a file, as it stands there."""
    text = source.files[file]
    start = text.index(f"hidden_states, residual = {variable}(")
    return text[start : text.index(")", start) + 1]


def test_a_call_by_keywords_that_the_layer_does_not_take(
    installed: VllmSource, replace_files: ReplaceFiles, write_config: WriteConfig
) -> None:
    loop = find_loop(installed, DEEPSEEK_FILE)
    call = "hidden_states, residual = layer(position_ids=positions, hidden_states=hidden_states, residual=residual)"
    replace_files(alter(installed, DEEPSEEK_FILE, loop, call))
    line = only_failing(write_config(DEEPSEEK_V3))
    assert line.subject == "layer call"
    assert "a keyword 'position_ids' that DeepseekV2DecoderLayer does not take" in line.found
    assert "no 'positions', which DeepseekV2DecoderLayer requires" in line.found


def test_an_argument_that_the_layer_requires_and_is_not_given(
    installed: VllmSource, replace_files: ReplaceFiles, write_config: WriteConfig
) -> None:
    loop = find_loop(installed, DEEPSEEK_FILE)
    replace_files(alter(installed, DEEPSEEK_FILE, loop, "hidden_states, residual = layer(positions, hidden_states)"))
    line = only_failing(write_config(DEEPSEEK_V3))
    assert "no 'residual', which DeepseekV2DecoderLayer requires" in line.found


def test_arguments_that_are_crossed(
    installed: VllmSource, replace_files: ReplaceFiles, write_config: WriteConfig
) -> None:
    loop = find_loop(installed, DEEPSEEK_FILE)
    replace_files(
        alter(installed, DEEPSEEK_FILE, loop, "hidden_states, residual = layer(hidden_states, positions, residual)")
    )
    line = only_failing(write_config(DEEPSEEK_V3))
    assert "'hidden_states' by position where DeepseekV2DecoderLayer takes 'positions'" in line.found


def test_an_embedding_method_of_another_release(
    installed: VllmSource, replace_files: ReplaceFiles, write_config: WriteConfig
) -> None:
    new = "embed_input_ids" if "def embed_input_ids" in installed.files[LLAMA_FILE] else "get_input_embeddings"
    replace_files(alter(installed, LLAMA_FILE, f"def {new}", "def embed_somehow"))
    (line,) = [one for one in check(Plan(write_config(LLAMA)), {}).lines if one.subject == "embedding method"]
    # The oldest releases call the method for some models only, and their protocol does not name it.
    if "embed" in installed.files["vllm/model_executor/models/interfaces_base.py"].partition("def _check")[0]:
        assert (line.verdict, line.advice) == ("fails", f"give LlamaForCausalLM a method {new}")
    assert line.verdict != "ok"
    assert "LlamaForCausalLM has none" in line.found


def test_a_patch_whose_target_moved(
    installed: VllmSource, replace_files: ReplaceFiles, write_config: WriteConfig
) -> None:
    replace_files(alter(installed, "vllm/v1/worker/gpu_worker.py", "    def load_model(", "    def load_weights_now("))
    line = only_failing(write_config(LLAMA))
    assert line.subject.startswith("patch tap_decoder_layers")
    assert "expected vllm.v1.worker.gpu_worker:Worker.load_model" in line.found


def test_layers_that_return_more_than_a_pair(
    installed: VllmSource, replace_files: ReplaceFiles, write_config: WriteConfig
) -> None:
    replace_files(
        alter(
            installed,
            LLAMA_FILE,
            "        return hidden_states, residual\n",
            "        return hidden_states, positions, hidden_states\n",
        )
    )
    line = only_failing(write_config(LLAMA))
    assert "LlamaDecoderLayer returns a tuple of 3, (hidden_states, positions, hidden_states)" in line.found


def test_the_embeddings_of_a_layer_that_names_them_otherwise(
    installed: VllmSource, replace_files: ReplaceFiles, write_config: WriteConfig
) -> None:
    text = installed.files["vllm/model_executor/models/opt.py"]
    body = text[text.index("class OPTDecoderLayer") :]
    forward = body[body.index("    def forward(") :]
    replace_files(
        {
            "vllm/model_executor/models/opt.py": text.replace(
                forward, forward.replace("hidden_states: torch", "rows: torch", 1), 1
            )
        }
    )
    config = {**LLAMA, "architectures": ["OPTForCausalLM"], "model_type": "opt"}
    assert only_failing(write_config(config), layers="0,2").subject == "layer id 0"


def test_a_model_without_one_residual_stream(installed: VllmSource, write_config: WriteConfig) -> None:
    """Hyper-connections, which config.json tells before the weights are read."""
    line = only_failing(write_config({**LLAMA, "hc_mult": 4}))
    assert line.subject == "residual stream"
    assert line.found.startswith("hc_mult=4: the layers hand on 4 streams")
