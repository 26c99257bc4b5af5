"""Architectures through the real engine on the CPU, one after the other, each in a fork of a process that has imported
everything: a crash or a hang costs one architecture, and nothing is imported twice.

    python architecture_run.py FOLDER NAME...     # prints one line of JSON for each, as it is done; NAME:dummy
                                                  # has weights that vLLM makes, even where transformers could

With `VLLM_OVERLAY=1` in the environment every layer is captured and judged; without, the engine only runs.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from architecture_fields import ENGINE
from architecture_models import Checkpoint, NoRecipe, write_checkpoint
from architecture_table import leave_out_folders

Verdict = Literal["equal", "consistent", "refused", "cannot be built", "differs", "fails", "no recipe", "runs"]

# Behind an architecture's name: with weights that vLLM makes, even where transformers could.
DUMMY = ":dummy"

SECONDS = 150
TOLERANCE = 1e-4
PROMPTS = tuple([(7 * i + 13 * j) % 120 + 4 for j in range(length)] for i, length in enumerate((5, 19, 33)))
NEW_TOKENS = 6


@dataclasses.dataclass(frozen=True)
class Finding:
    """What a run showed of an architecture.

    `difference` is the largest distance of a captured row from transformers', over the row's own size. `engine_class`
    is the class in vLLM that served it, `config` the configuration's class, `reason` why it is not captured, or what
    there is to say.
    """

    architecture: str
    verdict: Verdict
    reason: str = ""
    engine_class: str = ""
    config: str = ""
    dtype: str = "float32"
    layers: int = 0
    rows: int = 0
    difference: float | None = None
    seconds: float = 0.0


class Watch:
    """Hooks of our own on the built model, beside the taps: what every layer receives, and what follows the last."""

    def __init__(self, worker: Any) -> None:
        from vllm_overlay.capture.layers import find_decoder_layers

        self.model = worker.get_model()
        self.session = worker.overlay_session
        self.config = worker.vllm_config
        self.hidden_size = int(worker.vllm_config.model_config.get_hidden_size())
        count = int(worker.vllm_config.model_config.hf_text_config.num_hidden_layers)
        self.layers = find_decoder_layers(self.model, count)
        self.inputs: dict[int, Any] = {}
        self.rows: set[bytes] = set()
        self.norm: Any = None
        self.is_after_last = False
        self.faults: list[str] = []
        for module in self.model.modules():
            module.register_forward_pre_hook(self._note_next, with_kwargs=True)
        for index, layer in enumerate(self.layers):
            layer.register_forward_pre_hook(self._make_note(index), with_kwargs=True)
        self.layers[-1].register_forward_hook(self._note_end)
        self.model.register_forward_hook(self._note_return)

    def _make_note(self, index: int) -> Any:
        def note(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            bound = inspect.signature(layer.forward).bind(*args, **kwargs)
            self.inputs[index] = self._read_streams(bound.arguments)

        return note

    def _read_streams(self, arguments: dict[str, Any]) -> list[Any]:
        """What the residual stream may be among a layer's arguments: the first of width H, and it with `residual`.

        Which of the two it is, the final norm and the sampled tokens decide.
        """
        import torch

        named: dict[str, Any] = {}
        for name, value in arguments.items():
            named |= value if isinstance(value, dict) else {name: value}
        wide = {
            name: value.reshape(-1, self.hidden_size)
            for name, value in named.items()
            if isinstance(value, torch.Tensor) and value.is_floating_point() and value.shape[-1] == self.hidden_size
        }
        hidden = next((value for name, value in wide.items() if "residual" not in name), None)
        residual = wide.get("residual")
        if hidden is None:
            return []
        return [hidden.clone()] if residual is None else [hidden + residual, hidden.clone()]

    def _note_end(self, layer: Any, args: Any, output: Any) -> None:
        self.is_after_last = True
        if not self.inputs.get(0):
            self.faults.append("the first layer received no tensor of the model's width")
            return
        captured = self.session._taps.buffer[: len(self.inputs[0][0])]  # [tokens, ids, hidden]
        for index in range(len(self.layers)):
            if not any(_equal(stream, captured[:, index]) for stream in self.inputs.get(index, [])):
                self.faults.append(f"id {index} is not what layer {index} receives")
        self.rows |= {row.contiguous().numpy().tobytes() for row in captured.float().cpu()}

    def _note_next(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        import torch

        if not self.is_after_last:
            return
        wide = [
            value.reshape(-1, self.hidden_size)
            for value in (*args, *kwargs.values())
            if isinstance(value, torch.Tensor) and value.is_floating_point() and value.shape[-1] == self.hidden_size
        ]
        if not wide:
            return
        self.is_after_last = False
        streams = [wide[0]] if len(wide) == 1 else [wide[0] + wide[1], wide[0]]
        captured = self.session._taps.buffer[: len(wide[0]), -1]
        if not any(_equal(stream, captured) for stream in streams):
            self.faults.append(
                f"id {len(self.layers)} is not what {type(module).__name__} receives after the last layer"
            )
        self.norm = module

    def _note_return(self, model: Any, args: Any, output: Any) -> None:
        """A model that normalises with its logits (MiMo) returns what its last layer handed on."""
        if self.is_after_last:
            self.is_after_last = False
            if not _equal(output, self.session._taps.buffer[: len(output), -1]):
                self.faults.append(f"id {len(self.layers)} is not what the model returns")

    def gives(self, states: Any, tokens: Sequence[int]) -> bool:
        """Whether lm_head(norm(state)) is greatest, up to rounding, at the token that was sampled after each state.

        Rounding: another batch, and with it another order of summing, is 1e-5 of the greatest logit in float32 and 1e-2
        in bfloat16.
        """
        import torch
        from vllm.config import set_current_vllm_config

        with torch.inference_mode(), set_current_vllm_config(self.config):
            if self.norm is not None:
                normed = self.norm(states)
                states = normed[0] if isinstance(normed, tuple) else normed
            logits = self.model.compute_logits(states).float()
        rounding = (1e-5 if states.dtype == torch.float32 else 1e-2) * logits.abs().amax(dim=-1)
        sampled = logits[torch.arange(len(tokens)), torch.tensor(tokens)]
        return bool((sampled >= logits.amax(dim=-1) - rounding).all())


def _equal(stream: Any, captured: Any) -> bool:
    return stream.shape == captured.shape and bool(stream.equal(captured))


def run_engine(checkpoint: Checkpoint, architecture: str) -> Any:
    """An engine in this process, and what it generated."""
    from vllm import LLM
    from vllm.engine.arg_utils import EngineArgs

    options = {
        "model": str(checkpoint.folder),
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 128,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 128,
        "skip_tokenizer_init": True,
        "seed": 0,
        **ENGINE.get(architecture, {}),
    }
    if checkpoint.source != "transformers":
        options["load_format"] = "dummy"
        _widen_dummy_weights()
    if checkpoint.source == "fields":
        options["trust_remote_code"] = True
    if _is_multimodal(architecture):
        options["limit_mm_per_prompt"] = {"image": 0, "video": 0, "audio": 0}
        if "language_model_only" in EngineArgs.__dataclass_fields__:
            options["language_model_only"] = True
    return LLM(**options)


def generate(llm: Any) -> list[Any]:
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False)
    outputs: list[Any] = llm.generate([{"prompt_token_ids": ids} for ids in PROMPTS], params, use_tqdm=False)
    return outputs


def _is_multimodal(architecture: str) -> bool:
    from vllm.model_executor.models import registry

    return architecture in registry._MULTIMODAL_MODELS


def _widen_dummy_weights() -> None:
    """vLLM's own dummy weights are of size 1e-3, where every state is nearly the embedding; these are of size 0.1."""
    import functools

    from vllm.model_executor.model_loader import dummy_loader

    for name in ("initialize_dummy_weights", "initialize_single_dummy_weight"):
        function = getattr(dummy_loader, name, None)
        if function is not None:
            setattr(dummy_loader, name, functools.partial(function, low=-0.15, high=0.15))


def examine(architecture: str, folder: Path, store: Path | None, *, weights: bool) -> Finding:
    """Build, run and judge one architecture."""
    from vllm.model_executor.models import ModelRegistry
    from vllm.model_executor.models.registry import _VLLM_MODELS

    try:
        checkpoint = write_checkpoint(architecture, folder, weights=weights)
    except NoRecipe as error:
        return Finding(architecture, "no recipe", str(error))
    engine_class = "vLLM's backend of transformers' layers"
    if architecture in _VLLM_MODELS:
        engine_class = ".".join(_VLLM_MODELS[architecture])
        # Otherwise vLLM imports itself once more in a process of its own, to ask the class a few questions.
        ModelRegistry.register_model(architecture, ModelRegistry.models[architecture].load_model_cls())
    dtype = ENGINE.get(architecture, {}).get("dtype", "float32")
    finding = Finding(architecture, "runs", engine_class=engine_class, config=checkpoint.config, dtype=dtype)
    llm = run_engine(checkpoint, architecture)
    if store is None:
        generate(llm)
        return finding
    return judge(llm, checkpoint, store, finding)


def judge(llm: Any, checkpoint: Checkpoint, store: Path, finding: Finding) -> Finding:
    """Generate, and compare what was captured with transformers, or with itself."""
    from vllm.config import set_current_vllm_config

    from vllm_overlay.store import Store

    watches: list[Watch] = llm.collective_rpc(_watch)
    outputs = generate(llm)
    # A request that ends with the last step is told to the worker with the next one, or at the end.
    llm.collective_rpc("overlay_close")
    [watch] = watches
    opened = Store.open(store)
    faults = list(dict.fromkeys(watch.faults))
    records = [opened[output.request_id] for output in outputs]
    for output, prompt, record in zip(outputs, PROMPTS, records, strict=True):
        tokens = [*prompt, *output.outputs[0].token_ids]
        if record.token_ids.tolist() != tokens[:-1]:
            faults.append("a record's tokens are not the request's")
            continue
        if not {row.contiguous().numpy().tobytes() for row in record.hidden_states.float()} <= watch.rows:
            faults.append("a record holds rows that no step had")
        if not watch.gives(record.hidden_states[len(prompt) - 1 :, -1].clone(), tokens[len(prompt) :]):
            faults.append("lm_head(norm(last state)) does not give the sampled tokens")
    found = dataclasses.replace(
        finding, layers=len(watch.layers), rows=sum(len(record.token_ids) for record in records)
    )
    faults = list(dict.fromkeys(faults))
    # transformers' own layers, once vLLM's backend has changed them, ask for it.
    with set_current_vllm_config(watch.config):
        difference, said = _measure(checkpoint, records, len(watch.layers))
    if difference is not None and difference <= TOLERANCE:
        return dataclasses.replace(found, verdict="equal", difference=difference, reason="; ".join(faults))
    if faults:
        return dataclasses.replace(found, verdict="differs", difference=difference, reason="; ".join([said, *faults]))
    return dataclasses.replace(found, verdict="consistent", difference=difference, reason=said)


def _watch(worker: Any) -> Watch:
    return Watch(worker)


def _measure(checkpoint: Checkpoint, records: Sequence[Any], layers: int) -> tuple[float | None, str]:
    """The largest relative distance of a row from transformers', or None; and what there is to say of it."""
    import torch

    if checkpoint.reference is None:
        return None, "vLLM's dummy weights" if checkpoint.source == "vllm" else "no class in this transformers"
    try:
        states = [reference_states(checkpoint, record.token_ids, layers) for record in records]
    except Exception as error:  # noqa: BLE001 - whatever another library's forward dies of is the reason
        return None, f"transformers' own forward fails: {describe(error)}"
    distances = [
        (record.hidden_states - expected).norm(dim=-1) / expected.norm(dim=-1).clamp_min(1e-9)  # [tokens, ids]
        for record, expected in zip(records, states, strict=True)
    ]
    by_id = torch.cat(distances).amax(dim=0)
    first = next((index for index, distance in enumerate(by_id) if distance > TOLERANCE), layers)
    return float(by_id.max()), f"from id {first} on, transformers' states are {float(by_id.max()):.2g} away"


def reference_states(checkpoint: Checkpoint, token_ids: Any, layers: int) -> Any:
    """`[tokens, N + 1, hidden]` of transformers' forward; the last before the final norm."""
    import torch

    model = _load_reference(checkpoint)
    last: list[Any] = []
    [stack] = [
        module
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.ModuleList)
        and len(module) == layers
        and not any(word in name for word in ("vision", "visual", "audio", "encoder"))
        and name.count(".") <= 3
    ]
    handle = stack[-1].register_forward_hook(lambda module, args, output: last.append(output))
    with torch.no_grad():
        output = model(input_ids=token_ids[None], output_hidden_states=True, use_cache=False)
    handle.remove()
    end = last[-1][0] if isinstance(last[-1], tuple) else last[-1]
    if len(output.hidden_states) != layers + 1:
        raise ValueError(f"{len(output.hidden_states)} hidden states of {layers} layers")
    return torch.stack(
        [*(state[0] for state in output.hidden_states[:layers]), end.reshape(output.hidden_states[0][0].shape)], dim=1
    )


_REFERENCE: dict[Path, Any] = {}


def _load_reference(checkpoint: Checkpoint) -> Any:
    import torch

    if checkpoint.folder not in _REFERENCE:
        assert checkpoint.reference is not None
        _REFERENCE[checkpoint.folder] = checkpoint.reference.from_pretrained(  # type: ignore[attr-defined]
            str(checkpoint.folder), dtype=torch.float32, attn_implementation="eager"
        ).eval()
    return _REFERENCE[checkpoint.folder]


def describe(error: BaseException) -> str:
    """An error in one line: the first of its chain, which is the cause, with the place."""
    while error.__cause__ is not None or (error.__context__ is not None and not error.__suppress_context__):
        error = error.__cause__ or error.__context__  # type: ignore[assignment]
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    text = leave_out_folders(" ".join(str(error).split()))
    return f"{type(error).__name__}: {text[:300]}{place}"


def _is_ours(error: BaseException) -> bool:
    """Whether the overlay refused."""
    from vllm_overlay.errors import OverlayError

    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OverlayError):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def run_child(architecture: str, folder: Path, store: Path | None, *, weights: bool) -> Finding:
    began = time.monotonic()
    try:
        finding = examine(architecture, folder, store, weights=weights)
    except BaseException as error:  # noqa: BLE001 - whatever it dies of is what there is to say
        traceback.print_exc()
        verdict: Verdict = "refused" if store is not None and _is_ours(error) else "fails"
        finding = Finding(architecture, verdict, describe(error))
    return dataclasses.replace(finding, seconds=round(time.monotonic() - began, 1))


def run_forked(architecture: str, folder: Path, store: Path | None, *, weights: bool) -> Finding:
    """One architecture in a fork, with an end in time."""
    shutil.rmtree(folder, ignore_errors=True)
    if store is not None:
        shutil.rmtree(store, ignore_errors=True)
    folder.mkdir(parents=True)
    answer = folder / "finding.json"
    child = os.fork()
    if child == 0:
        os.setsid()
        log = os.open(folder / "log.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        finding = run_child(architecture, folder / "model", store, weights=weights)
        answer.write_text(json.dumps(dataclasses.asdict(finding)))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
    deadline = time.monotonic() + SECONDS
    status: int | None = None
    while status is None and time.monotonic() < deadline:
        done, code = os.waitpid(child, os.WNOHANG)
        if done:
            status = code
        else:
            time.sleep(0.1)
    if status is None:
        os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return Finding(architecture, "fails", f"no end within {SECONDS} s", seconds=SECONDS)
    if not answer.is_file():
        return Finding(architecture, "fails", f"the process ended with status {status}")
    return Finding(**json.loads(answer.read_text()))


def main(words: Sequence[str]) -> int:
    folder = Path(words[0])
    store = Path(os.environ["VLLM_OVERLAY_CAPTURE"]) if os.environ.get("VLLM_OVERLAY") == "1" else None
    import torch  # noqa: F401
    import transformers  # noqa: F401
    import vllm.v1.engine.llm_engine
    import vllm.v1.worker.cpu_worker  # noqa: F401
    from vllm import LLM  # noqa: F401

    for word in words[1:]:
        architecture = word.removesuffix(DUMMY)
        finding = run_forked(architecture, folder / architecture, store, weights=word == architecture)
        print(json.dumps(dataclasses.asdict(finding)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
