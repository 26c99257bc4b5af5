"""The process of a rehearsal: builds the small model in vLLM, captures a few requests, and compares what was stored.

    python -m vllm_overlay.rehearsal.run FOLDER PIPE

The folder holds the plan and the small model's config.json; the outcome is written there. When the pipe, a descriptor
to read from, ends, whoever asked for the rehearsal is gone, and it ends too.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import sys
import threading
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_overlay.rehearsal.plan import (
    MAX_LENGTH,
    MODEL,
    STORE,
    TOKENS,
    Outcome,
    RehearsalPlan,
    note_stage,
    read_plan,
    read_stage,
)

NEW_TOKENS = 6
# Less than the longest prompt: its rows come in two steps.
MAX_BATCHED_TOKENS = 128
# More than a block of vLLM's KV cache on a CPU.
PREFIX = 144
# The prompts of two calls. The first of the second call begins as the first of the first does, which is cached by then.
LENGTHS = ((160, 5, 19), (150, 33))
_MODALITIES = ("image", "video", "audio", "vision_chunk")
_FIRST_FAILURE = re.compile(r"vllm-overlay: what failed first: (.*)")


def rehearse(folder: Path, plan: RehearsalPlan) -> Outcome:
    """Run the small model. Errors: whatever vLLM, or capture, dies of."""
    from vllm_overlay.offline.engine import shut_down
    from vllm_overlay.rehearsal.reference import TOLERANCE

    reference, said = None, "vLLM's own random weights"
    if plan.from_transformers:
        note_stage(folder, "making random weights")
        reference, said = _make_reference(folder / MODEL)
    note_stage(folder, "building the engine")
    llm = _build(folder, plan, has_weights=reference is not None)
    model_class = llm.collective_rpc("rehearsal_watch")[0]
    note_stage(folder, "generating")
    outputs = [output for batch in _list_prompts(plan.special_ids) for output in _generate(llm, batch)]
    llm.collective_rpc("overlay_flush")
    reports = llm.collective_rpc("rehearsal_report")
    note_stage(folder, "reading the store")
    shut_down(llm)
    held = _read_records(folder / STORE, outputs)
    faults = [fault for report in reports for fault in report["faults"]]
    faults += _find_faults(held, {row for report in reports for row in report["rows"]})
    if faults:
        return Outcome("wrong", "; ".join(dict.fromkeys(faults)), stage="comparing", model_class=model_class)
    difference, said = _measure(reference, held, said)
    is_equal = difference is not None and difference <= TOLERANCE
    return Outcome(
        "equal" if is_equal else "consistent",
        "" if is_equal else said,
        model_class=model_class,
        layers=len(held.layer_ids) - 1,
        records=len(held.token_ids),
        rows=sum(map(len, held.token_ids)),
        difference=difference,
        ranks=len(reports),
    )


def _make_reference(model: Path) -> tuple[Any | None, str]:
    """transformers' model, or None and why there is none: vLLM then makes the weights."""
    from vllm_overlay.rehearsal.reference import write_weights

    try:
        reference = write_weights(model)
    except Exception as error:  # noqa: BLE001  whatever another library dies of, the model is still to be rehearsed
        for file in model.glob("*.safetensors*"):
            file.unlink()
        return None, f"transformers cannot make it: {describe(error)}"
    return reference, "" if reference is not None else "this transformers has no class for it"


def _build(folder: Path, plan: RehearsalPlan, *, has_weights: bool) -> Any:
    from vllm import LLM
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.models import ModelRegistry

    from vllm_overlay.rehearsal.worker import EXTENSION, LOAD_FORMAT

    options: dict[str, Any] = {
        "model": str(folder / MODEL),
        "dtype": plan.dtype,
        "tensor_parallel_size": _count_ranks(plan),
        "trust_remote_code": plan.trust_remote_code,
        "enforce_eager": True,
        "max_model_len": MAX_LENGTH,
        "max_num_batched_tokens": MAX_BATCHED_TOKENS,
        "max_num_seqs": 4,
        "skip_tokenizer_init": True,
        "seed": 0,
        "worker_extension_cls": EXTENSION,
    }
    if not has_weights:
        options["load_format"] = LOAD_FORMAT
    if not plan.is_cpu:
        # Beside what else runs on the device: the small model takes next to nothing.
        options["gpu_memory_utilization"] = 0.2
    architectures = json.loads(Path(folder, MODEL, "config.json").read_text(encoding="utf-8"))["architectures"]
    known = [ModelRegistry.models[one] for one in architectures if one in ModelRegistry.models]
    if known and known[0].inspect_model_cls().supports_multimodal:
        options["limit_mm_per_prompt"] = dict.fromkeys(_MODALITIES, 0)
        if "language_model_only" in EngineArgs.__dataclass_fields__:
            options["language_model_only"] = True
    return LLM(**options)


def _count_ranks(plan: RehearsalPlan) -> int:
    """As many as are wanted, or as there are devices."""
    import torch

    return plan.tensor_parallel_size if plan.is_cpu else min(plan.tensor_parallel_size, torch.cuda.device_count())


def _list_prompts(special_ids: Sequence[int]) -> list[list[list[int]]]:
    """The prompts of each call, of tokens that have no meaning of their own."""
    free = [token for token in TOKENS if token not in special_ids]
    prefix = [free[7 * place % len(free)] for place in range(PREFIX)]
    return [
        [_make_prompt(prefix, length, 10 * call + place, free) for place, length in enumerate(lengths)]
        for call, lengths in enumerate(LENGTHS)
    ]


def _make_prompt(prefix: Sequence[int], length: int, number: int, free: Sequence[int]) -> list[int]:
    own = [free[(13 * number + 5 * place + 1) % len(free)] for place in range(length)]
    return [*prefix, *own[PREFIX:]] if length > PREFIX else own


def _generate(llm: Any, prompts: list[list[int]]) -> list[Any]:
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False)
    outputs: list[Any] = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    return outputs


@dataclass(frozen=True)
class Held:
    """The records of the requests, in memory: of each its tokens `[T]`, its states as stored, float32
    `[T, ids, hidden]`, and the tokens `[T + 1]` that the request ended with."""

    layer_ids: tuple[int, ...]
    token_ids: list[Any]
    states: list[Any]
    wanted: list[list[int]]


def _read_records(store: Path, outputs: Sequence[Any]) -> Held:
    """What the engine left. Errors: StoreError for a record that is not there, or misses rows."""
    from vllm_overlay.store import Store

    with Store.open(store) as opened:
        records = [opened[output.request_id] for output in outputs]
        return Held(
            opened.layer_ids,
            [record.token_ids.clone() for record in records],
            [record.hidden_states.float().clone() for record in records],
            [[*output.prompt_token_ids, *output.outputs[0].token_ids] for output in outputs],
        )


def _find_faults(held: Held, seen: set[str]) -> list[str]:
    """What of the records is not what the engine computed. `seen` are the digests of the rows of its steps."""
    from vllm_overlay.rehearsal.watch import digest

    faults = []
    for tokens, states, wanted in zip(held.token_ids, held.states, held.wanted, strict=True):
        if tokens.tolist() != wanted[:-1]:
            faults.append("a record's tokens are not its request's")
        elif not {digest(row) for row in states} <= seen:
            faults.append("a record holds rows that no step had")
        columns = [states[:, held.layer_ids.index(layer_id)] for layer_id in sorted(held.layer_ids)]
        same = [place for place in range(len(columns) - 1) if columns[place].equal(columns[place + 1])]
        faults += [f"layer ids {place} and {place + 1} hold the same states" for place in same]
    return faults


def _measure(reference: Any | None, held: Held, said: str) -> tuple[float | None, str]:
    """The largest relative distance of a row from transformers', or None; and what there is to say of it."""
    import torch

    from vllm_overlay.rehearsal.reference import TOLERANCE, compute_states

    if reference is None:
        return None, said
    layers = len(held.layer_ids) - 1
    try:
        states = [compute_states(reference, tokens, layers) for tokens in held.token_ids]
    except Exception as error:  # noqa: BLE001  whatever another library's forward dies of is why nothing is compared
        return None, f"transformers' own forward fails: {describe(error)}"
    distances = [
        (stored - expected[:, held.layer_ids]).norm(dim=-1) / expected[:, held.layer_ids].norm(dim=-1).clamp_min(1e-9)
        for stored, expected in zip(held.states, states, strict=True)
    ]  # [tokens, ids] each
    by_id = torch.cat(distances).amax(dim=0)
    largest = float(by_id.max())
    away = sorted(held.layer_ids[column] for column in range(len(by_id)) if by_id[column] > TOLERANCE)
    return largest, f"from layer id {away[0]} on, transformers' states are {largest:.2g} away" if away else ""


def describe(error: BaseException) -> str:
    """An error in one line: what failed first in a worker, or else the first of its chain, with the place."""
    if (found := _FIRST_FAILURE.search(str(error))) is not None:
        return found[1]
    while (cause := error.__cause__ or (None if error.__suppress_context__ else error.__context__)) is not None:
        error = cause
        if (found := _FIRST_FAILURE.search(str(error))) is not None:
            return found[1]
    frames = traceback.extract_tb(error.__traceback__)
    place = f' (file "{frames[-1].filename}", line {frames[-1].lineno}, in {frames[-1].name})' if frames else ""
    return f"{type(error).__name__}: {' '.join(str(error).split()) or '(no message)'}{place}"


def end_with_caller(pipe: int, folder: Path) -> None:
    """When the caller ends, end this process and the workers, which are of its group; the folder is the caller's."""
    import psutil  # vLLM requires it

    os.read(pipe, 1)
    # The workers first: they write into the folder.
    workers = psutil.Process().children(recursive=True)
    for worker in workers:
        with contextlib.suppress(psutil.NoSuchProcess):
            worker.kill()
    psutil.wait_procs(workers, timeout=10)
    shutil.rmtree(folder, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)


def main(words: Sequence[str]) -> int:
    """Write the outcome into the folder, whatever happens in vLLM."""
    folder = Path(words[0])
    threading.Thread(target=end_with_caller, args=[int(words[1]), folder], daemon=True).start()
    try:
        outcome = rehearse(folder, read_plan(folder))
    except Exception as error:  # noqa: BLE001  what it dies of is the outcome
        details = traceback.format_exc()
        outcome = Outcome(
            "died", describe(error), details, read_stage(folder), in_weights=", in load_weights\n" in details
        )
    outcome.write(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
