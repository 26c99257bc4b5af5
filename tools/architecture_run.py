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

from architecture_causes import CAUSES
from architecture_fields import ENGINE, LATENT_ALWAYS
from architecture_models import Checkpoint, NoRecipe, write_checkpoint
from architecture_standins import stand_in
from architecture_table import leave_out_folders

Verdict = Literal["equal", "consistent", "refused", "cannot be built", "differs", "fails", "no recipe", "runs"]

# Behind an architecture's name: with weights that vLLM makes, even where transformers could.
DUMMY = ":dummy"

SECONDS = 150
TOLERANCE = 1e-4
# Of logprobs of another batch, whose sums are in another order, over the largest logprob.
ROUNDING = {"float32": 1e-5, "bfloat16": 1e-2}
PROMPTS = tuple([(7 * i + 13 * j) % 120 + 4 for j in range(length)] for i, length in enumerate((5, 19, 33)))
NEW_TOKENS = 6


@dataclasses.dataclass(frozen=True)
class Finding:
    """What a run showed of an architecture.

    `difference` is the largest distance of a captured row from transformers', over the row's own size; `head` that of
    the logprobs which the model's own norm and head give of the last captured state from those that vLLM returned, and
    `logprobs` that of those that vLLM returned from transformers', both over the largest logprob. `engine_class` is the
    class in vLLM that served it, `config` the configuration's class, `reason` why it is not captured, or what there is
    to say.
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
    head: float | None = None
    logprobs: float | None = None
    seconds: float = 0.0


class Watch:
    """Hooks of our own on the built model, beside the taps: what every layer receives, and what follows the last."""

    def __init__(self, worker: Any) -> None:
        from vllm_overlay.capture.layers import count_layers, find_decoder_layers

        self.model = worker.get_model()
        self.session = worker.overlay_session
        self.config = worker.vllm_config
        self.hidden_size = int(worker.vllm_config.model_config.get_hidden_size())
        self.layers = find_decoder_layers(self.model, count_layers(self.config.model_config.hf_text_config))
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

    def give_logprobs(self, states: Any) -> Any:
        """Of `[tokens, hidden]` of id N through the model's own norm and head: `[tokens, vocabulary]` in float32."""
        import torch
        from vllm.config import set_current_vllm_config

        with torch.inference_mode(), set_current_vllm_config(self.config):
            if self.norm is not None:
                normed = self.norm(states)
                states = normed[0] if isinstance(normed, tuple) else normed
            return self.model.compute_logits(states).float().log_softmax(dim=-1)


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
        "max_logprobs": -1,
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

    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False, logprobs=-1)
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
    if architecture in LATENT_ALWAYS:
        os.environ.pop("VLLM_MLA_DISABLE", None)
    said = stand_in(architecture)
    dtype = ENGINE.get(architecture, {}).get("dtype", "float32")
    finding = Finding(
        architecture, "runs", engine_class=engine_class, config=checkpoint.config, dtype=dtype, reason=said
    )
    llm = run_engine(checkpoint, architecture)
    if store is None:
        generate(llm)
        return finding
    return judge(llm, checkpoint, store, finding)


def judge(llm: Any, checkpoint: Checkpoint, store: Path, finding: Finding) -> Finding:
    """Generate, and compare what was captured with transformers, with itself, and with vLLM's own answer."""
    from vllm.config import set_current_vllm_config

    from vllm_overlay.store import Store

    watches: list[Watch] = llm.collective_rpc(_watch)
    outputs = generate(llm)
    # A request that ends with the last step is told to the worker with the next one, or at the end.
    llm.collective_rpc("overlay_close")
    [watch] = watches
    opened = Store.open(store)
    records = [opened[output.request_id] for output in outputs]
    found = dataclasses.replace(
        finding, layers=len(watch.layers), rows=sum(len(record.token_ids) for record in records)
    )
    faults = list(watch.faults)
    for output, prompt, record in zip(outputs, PROMPTS, records, strict=True):
        if record.token_ids.tolist() != [*prompt, *output.outputs[0].token_ids[:-1]]:
            return dataclasses.replace(found, verdict="differs", reason="a record's tokens are not the request's")
        if not {row.contiguous().numpy().tobytes() for row in record.hidden_states.float()} <= watch.rows:
            faults.append("a record holds rows that no step had")
    returned = [_read_logprobs(output) for output in outputs]
    head = max(
        _compare_logprobs(watch.give_logprobs(record.hidden_states[len(prompt) - 1 :, -1].clone()), logprobs)
        for record, prompt, logprobs in zip(records, PROMPTS, returned, strict=True)
    )
    if not head <= ROUNDING[finding.dtype]:
        faults.append(f"head(norm(last state)) gives logprobs {head:.2g} away from vLLM's own")
    # transformers' own layers, once vLLM's backend has changed them, ask for it.
    with set_current_vllm_config(watch.config):
        comparison = _compare(checkpoint, found, records, returned)
    found = dataclasses.replace(
        found,
        head=head,
        difference=comparison.difference,
        logprobs=comparison.logprobs,
        reason="; ".join(filter(None, [finding.reason, comparison.said, *dict.fromkeys(faults)])),
    )
    if faults:
        return dataclasses.replace(found, verdict="differs")
    return dataclasses.replace(found, verdict="equal" if comparison.is_equal else "consistent")


def _watch(worker: Any) -> Watch:
    return Watch(worker)


def _read_logprobs(output: Any) -> Any:
    """What vLLM returned of every token of the vocabulary after each state: `[generated, vocabulary]`."""
    import torch

    steps = output.outputs[0].logprobs
    return torch.tensor([[step[token].logprob for token in range(len(step))] for step in steps])


def _compare_logprobs(given: Any, returned: Any) -> float:
    """The largest distance over the largest logprob; infinite where only one of the two has a finite one."""
    import torch

    if given.shape != returned.shape or not torch.equal(given.isfinite(), returned.isfinite()):
        return float("inf")
    finite = returned.isfinite()
    return float((given - returned)[finite].abs().max() / returned[finite].abs().max())


@dataclasses.dataclass(frozen=True)
class Comparison:
    """With transformers: the two distances of a Finding, None where there is no reference, and what there is to say."""

    said: str
    difference: float | None = None
    logprobs: float | None = None

    @property
    def is_equal(self) -> bool:
        return self.difference is not None and self.difference <= TOLERANCE


def _compare(checkpoint: Checkpoint, finding: Finding, records: Sequence[Any], returned: Sequence[Any]) -> Comparison:
    """With transformers in float32; where that is not equal, with what vLLM is known to do instead, or in its dtype."""
    import torch

    if checkpoint.reference is None:
        said = "vLLM's dummy weights" if checkpoint.source == "vllm" else "no class in this transformers"
        return Comparison(said)
    model = _load_reference(checkpoint, torch.float32)
    states = [record.hidden_states for record in records]
    try:
        stock = [give_reference(model, record.token_ids, finding.layers) for record in records]
    except Exception as error:  # noqa: BLE001 - whatever another library's forward dies of is the reason
        return Comparison(f"transformers' own forward fails: {describe(error)}")
    by_id = _measure(states, [expected for expected, _ in stock])
    logprobs = max(
        _compare_logprobs(expected[-len(own) :], own) for own, (_, expected) in zip(returned, stock, strict=True)
    )
    furthest = max(by_id)
    if furthest <= TOLERANCE:
        return Comparison("", furthest, logprobs)
    first = next(index for index, distance in enumerate(by_id) if not distance <= TOLERANCE)
    said = f"from id {first} on transformers' states are {furthest:.2g} away, vLLM's own logprobs {logprobs:.2g}"
    if finding.architecture in CAUSES:
        cause = CAUSES[finding.architecture]
        cause.change(model)
        changed = [give_reference(model, record.token_ids, finding.layers)[0] for record in records]
        said += f"; {cause.said}, and with the same in transformers they are {max(_measure(states, changed)):.2g} away"
    if finding.dtype == "bfloat16":
        rounded = _load_reference(checkpoint, torch.bfloat16)
        own = [give_reference(rounded, record.token_ids, finding.layers)[0] for record in records]
        by_rounding = max(_measure(own, [expected for expected, _ in stock]))
        said += f"; this is bfloat16, and transformers' own is {by_rounding:.2g} away from its float32"
    return Comparison(said, furthest, logprobs)


def _measure(states: Sequence[Any], expected: Sequence[Any]) -> list[float]:
    """By layer id the largest distance of a row of `[tokens, ids, hidden]` from the expected one, over its size."""
    import torch

    distances = [
        (given - wanted).norm(dim=-1) / wanted.norm(dim=-1).clamp_min(1e-9)
        for given, wanted in zip(states, expected, strict=True)
    ]
    by_id: list[float] = torch.cat(distances).amax(dim=0).tolist()
    return by_id


def _load_reference(checkpoint: Checkpoint, dtype: Any) -> Any:
    assert checkpoint.reference is not None
    return checkpoint.reference.from_pretrained(  # type: ignore[attr-defined]
        str(checkpoint.folder), dtype=dtype, attn_implementation="eager"
    ).eval()


def give_reference(model: Any, token_ids: Any, layers: int) -> tuple[Any, Any]:
    """Of transformers' forward: `[tokens, N + 1, hidden]`, what each layer receives and what the last returns; and
    logprobs `[tokens, vocabulary]`; both in float32.
    """
    import torch

    states: list[Any] = []
    [stack] = [
        module
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.ModuleList)
        and len(module) == layers
        and not any(word in name for word in ("vision", "visual", "audio", "encoder"))
        and name.count(".") <= 3
    ]

    def note_input(module: Any, args: Any, kwargs: Any) -> None:
        states.append(args[0] if args else kwargs["hidden_states"])

    def note_output(module: Any, args: Any, output: Any) -> None:
        states.append(output[0] if isinstance(output, tuple) else output)

    handles = [layer.register_forward_pre_hook(note_input, with_kwargs=True) for layer in stack]
    handles.append(stack[-1].register_forward_hook(note_output))
    with torch.no_grad():
        output = model(input_ids=token_ids[None], use_cache=False)
    for handle in handles:
        handle.remove()
    rows = [state.reshape(len(token_ids), -1).float() for state in states]  # [tokens, hidden]
    return torch.stack(rows, dim=1), output.logits[0].float().log_softmax(dim=-1)


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
