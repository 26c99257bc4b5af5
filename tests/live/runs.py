"""Real engines for the live tests: a user's script in a process of its own, with or without the overlay."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

SCRIPT = Path(__file__).parent / "scripts" / "generate.py"
# What a host's installation of vLLM needs to run at all.
OF_THE_HOST = ("VLLM_USE_FLASHINFER_SAMPLER", "VLLM_ALLREDUCE_USE_SYMM_MEM")
LIMIT_S = 800.0
ENGINE = {"dtype": "float32", "enforce_eager": True, "max_model_len": 256, "skip_tokenizer_init": True}


def make_prompt(seed: int, length: int, prefix: list[int] | None = None) -> list[int]:
    """A prompt of `length` random tokens that begins with `prefix`."""
    generator = random.Random(seed)
    return [*(prefix or []), *(generator.randrange(4, 128) for _ in range(length - len(prefix or [])))]


@dataclass(frozen=True)
class Batch:
    """One call of `generate`. `overlays`: what each request says of its capture, if any does."""

    prompts: list[list[int]]
    max_tokens: int
    ignore_eos: bool = True
    stop_token_ids: tuple[int, ...] = ()
    overlays: tuple[dict[str, Any], ...] = ()

    def to_json(self) -> dict[str, Any]:
        params = {"max_tokens": self.max_tokens, "ignore_eos": self.ignore_eos, "stop_token_ids": self.stop_token_ids}
        return {"prompts": self.prompts, "params": params, "overlays": self.overlays}


@dataclass(frozen=True)
class Answer:
    """One request's generated tokens."""

    request_id: str
    token_ids: list[int]


def clean_environment(extra: dict[str, str]) -> dict[str, str]:
    """This environment with no VLLM_ variable but what an offline engine on a small CPU needs, and `extra`."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("VLLM_") or key in OF_THE_HOST}
    base = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    return kept | base | extra


def overlay_environment(**settings: str | Path) -> dict[str, str]:
    """The overlay switched on; a release that it has not seen is tried if the matrix was told to."""
    policy = {name: os.environ[name] for name in ("VLLM_OVERLAY_POLICY",) if name in os.environ}
    return {"VLLM_OVERLAY": "1"} | policy | {f"VLLM_OVERLAY_{name.upper()}": str(it) for name, it in settings.items()}


def run_script(
    folder: Path,
    model: Path,
    batches: list[Batch],
    *,
    environment: dict[str, str] | None = None,
    limit: float = LIMIT_S,
    **engine: Any,
) -> list[list[Answer]]:
    """Run the user's script; answers by batch and request. A failed run, and one that takes longer than `limit`
    seconds, fails the test with the log's end."""
    folder.mkdir(parents=True, exist_ok=True)
    plan, out = folder / "plan.json", folder / "answers.json"
    arguments = ENGINE | {"model": str(model)} | engine
    plan.write_text(
        json.dumps({"engine": arguments, "batches": [batch.to_json() for batch in batches], "out": str(out)})
    )
    done = run_python([str(SCRIPT), str(plan)], environment or {}, limit)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    answers = json.loads(out.read_text())
    return [[Answer(r["id"], r["token_ids"]) for r in answer["requests"]] for answer in answers]


def run_python(
    words: list[str], environment: dict[str, str], limit: float = LIMIT_S
) -> subprocess.CompletedProcess[str]:
    """A Python process with the clean environment and these variables. One that takes longer than `limit` seconds fails
    the test with its output's end, and nothing that it started lives on."""
    command = [sys.executable, *words]
    with subprocess.Popen(
        command, env=clean_environment(environment), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            stdout, stderr = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            kill_with_children(process)
            stdout, stderr = process.communicate()
            raise AssertionError(f"not done in {limit:.0f} s: {stdout[-3000:]}{stderr[-6000:]}") from None
        finally:
            kill_with_children(process)
    return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)


def kill_with_children(process: subprocess.Popen[Any]) -> None:
    """If it lives. An engine that starts does not hear of its front end's end, and would keep a GPU's memory."""
    if process.poll() is not None:
        return
    parent = psutil.Process(process.pid)
    for one in (*parent.children(recursive=True), parent):
        with suppress(psutil.NoSuchProcess):
            one.kill()


class Reference:
    """The transformers forward of a checkpoint: states of ids 0..N of any text, the last before the final norm.

    What it is given and gives is on the CPU, wherever it computes.
    """

    def __init__(self, model: Path, device: str = "cpu") -> None:
        from transformers import AutoModelForCausalLM

        self.device = device
        self.model = AutoModelForCausalLM.from_pretrained(str(model), dtype=torch.float32).to(device).eval()
        self.num_layers = int(self.model.config.num_hidden_layers)
        self._before_norm = torch.empty(0)
        self.model.model.norm.register_forward_pre_hook(self._keep)

    def _keep(self, module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        self._before_norm = args[0]

    @torch.no_grad()
    def states(self, token_ids: torch.Tensor) -> torch.Tensor:
        """`[tokens, N + 1, hidden]`."""
        output = self.model(token_ids[None].to(self.device), output_hidden_states=True)
        # transformers gives the last state after the final norm.
        inner = [state[0] for state in output.hidden_states[: self.num_layers]]
        return torch.stack([*inner, self._before_norm[0]], dim=1).cpu()

    @torch.no_grad()
    def logits_of(self, state: torch.Tensor) -> torch.Tensor:
        """lm_head(norm(state))."""
        logits: torch.Tensor = self.model.lm_head(self.model.model.norm(state.to(self.device)))
        return logits.cpu()

    @torch.no_grad()
    def logits(self, token_ids: torch.Tensor) -> torch.Tensor:
        """The model's own logits, `[tokens, vocabulary]`."""
        logits: torch.Tensor = self.model(token_ids[None].to(self.device)).logits[0]
        return logits.cpu()


def list_processes(variable: str, value: str) -> list[str]:
    """The processes that were started with this value of an environment variable and live."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(variable) == value and process.status() != psutil.STATUS_ZOMBIE:
                found.append(f"{process.pid}: {' '.join(process.cmdline())}")
        except psutil.Error:  # It ended while we looked, or is another user's.
            continue
    return found
