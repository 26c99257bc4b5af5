"""What capture costs: tokens/s of the same vLLM with capture on, over off, for prefill and for decode, in one run.

usage: python tools/benchmark.py --model MODEL [--prefill 64x256] [--decode 32x64+128] [--rounds 6] [--native]
       [--output FILE.json] [-- vLLM engine options]

Two engines, each in a process of its own, one with capture on and one without, are alive at the same time and take
turns: off, on, on, off, and so on. A shared machine changes its speed by a third within minutes, which comparing one
engine's rounds with another's five minutes later would measure; rounds that lie side by side see the same machine. Both
engines of a pair get the same prompts, every pair fresh ones (the prefix cache finds nothing). The first pair warms up
and is not counted. A round with capture ends when its records are in the store. The figure is the median of the pairs'
quotients. The stores are written below --store (default: a temporary folder) and removed. At the end, without vLLM,
what the accounting of such a decode step takes on the host, in microseconds: tools/step_cost.py says of which parts.

With --native a third engine takes its turn, with vLLM's own `extract_hidden_states` (from 0.22 on) for the same layers:
it keeps the rows of the prompts only. Its round ends when its files are written; they are then removed.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import random
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SIDES = ("off", "on")
NATIVE = "native"

# Returns when what a round captured is on disk.
EndRound = Callable[[list[Any]], object]


@dataclass(frozen=True)
class Workload:
    """So many requests of so many random tokens, each answered with so many."""

    requests: int
    tokens_in: int
    tokens_out: int

    @property
    def counted_tokens(self) -> int:
        """Prompt tokens where one token is generated, generated tokens otherwise."""
        return self.requests * (self.tokens_in if self.tokens_out == 1 else self.tokens_out)

    @staticmethod
    def parse(text: str) -> Workload:
        """`64x256`: 64 prompts of 256 tokens; `32x64+128`: with 128 generated tokens each."""
        requests, _, lengths = text.partition("x")
        tokens_in, _, tokens_out = lengths.partition("+")
        return Workload(int(requests), int(tokens_in), int(tokens_out or 1))


class Side:
    """An engine in a process of its own, which runs a round when it is told to."""

    def __init__(self, name: str, store: str, args: argparse.Namespace, engine_options: list[str]) -> None:
        environment = {key: value for key, value in os.environ.items() if not key.startswith("VLLM_OVERLAY")}
        if name == NATIVE:
            engine_options = [*engine_options, *extract_natively(args, store)]
        if name == "on":
            environment |= {"VLLM_OVERLAY": "1", "VLLM_OVERLAY_CAPTURE": store, "VLLM_OVERLAY_LAYERS": args.layers}
        command = [sys.executable, __file__, "--serve-side", name, "--model", args.model, "--", *engine_options]
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.facts: dict[str, Any] = self._read()

    def run_round(self, workload: Workload, seed: int) -> float:
        """Tokens/s of one call of generate."""
        self._ask({"round": [workload.requests, workload.tokens_in, workload.tokens_out], "seed": seed})
        return workload.counted_tokens / float(self._read()["seconds"])

    def end(self) -> dict[str, Any]:
        """Shut the engine down; what the capture session counted."""
        self._ask({"end": True})
        counts = self._read()
        self._process.wait()
        return counts

    def __enter__(self) -> Side:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self._process.terminate()
            self._process.wait()

    def _ask(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message) + "\n")
        self._process.stdin.flush()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"benchmark: an engine ended with exit status {self._process.wait()}; its log is above")
        answer: dict[str, Any] = json.loads(line)
        return answer


def main() -> int:
    words, engine_options = _split(sys.argv[1:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="what vLLM takes as a model")
    parser.add_argument("--prefill", default="64x256", metavar="REQUESTSxTOKENS", help="default: 64x256")
    parser.add_argument("--decode", default="32x64+128", metavar="REQUESTSxIN+OUT", help="default: 32x64+128")
    parser.add_argument("--rounds", type=int, default=6, help="pairs of rounds that are counted (default: 6)")
    parser.add_argument("--layers", default="eagle3", help="layers to capture (default: eagle3)")
    parser.add_argument("--store", help="folder for the store (default: a temporary one)")
    parser.add_argument("--output", type=Path, help="write the figures here as JSON too")
    parser.add_argument("--native", action="store_true", help="measure vLLM's own extract_hidden_states as well")
    parser.add_argument("--serve-side", choices=(*SIDES, NATIVE), help=argparse.SUPPRESS)
    args = parser.parse_args(words)
    if args.serve_side:
        return _serve(args, engine_options)
    text = json.dumps(_compare(args, engine_options), indent=2)
    print(text)
    if args.output:
        args.output.write_text(text + "\n")
    return 0


def _split(words: list[str]) -> tuple[list[str], list[str]]:
    at = words.index("--") if "--" in words else len(words)
    return words[:at], words[at + 1 :]


def _compare(args: argparse.Namespace, engine_options: list[str]) -> dict[str, Any]:
    # Here, because the process of the side without capture shall load nothing of ours.
    from step_cost import measure

    command = shlex.join(["python", *sys.argv]).replace(str(Path.home()), "~")
    report: dict[str, Any] = {"command": command, "date": time.strftime("%Y-%m-%d")}
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="vllm-overlay-benchmark-", dir=args.store))
        # One after the other: on a GPU, vLLM measures free memory while it starts.
        names = (*SIDES, NATIVE) if args.native else SIDES
        sides = {name: stack.enter_context(Side(name, f"{folder}/{name}", args, engine_options)) for name in names}
        report["versions"] = sides["on"].facts
        for name in ("prefill", "decode"):
            report[name] = _compare_workload(name, Workload.parse(getattr(args, name)), sides, args.rounds)
        report["capture"] = [side.end() for side in sides.values()][SIDES.index("on")]
        decode = Workload.parse(args.decode)
        costs = measure(Path(folder) / "step-cost", decode.requests, decode.tokens_in, decode.tokens_out)
        report["host_microseconds_per_decode_step"] = {part: round(cost, 1) for part, cost in costs.items()}
    return report


def _compare_workload(name: str, workload: Workload, sides: dict[str, Side], rounds: int) -> dict[str, Any]:
    pairs = []
    for number in range(rounds + 1):
        order = list(sides) if number % 2 else list(sides)[::-1]
        speeds = {side: sides[side].run_round(workload, seed=1000 * len(name) + number) for side in order}
        print(f"{name}, pair {number}: {speeds}, {speeds['on'] / speeds['off']:.3f}", file=sys.stderr)
        pairs.append(speeds)
    counted = pairs[1:]
    report: dict[str, Any] = {}
    for side in sides:
        report[f"tokens_per_second_{side}"] = round(statistics.median(pair[side] for pair in counted), 1)
    for side in [side for side in sides if side != "off"]:
        quotients = [pair[side] / pair["off"] for pair in counted]
        report[f"{side}_over_off"] = round(statistics.median(quotients), 4)
        report[f"{side}_over_off_of_each_pair"] = [round(quotient, 3) for quotient in quotients]
    return report | {f"rounds_{side}": [round(pair[side], 1) for pair in counted] for side in sides}


def _serve(args: argparse.Namespace, engine_options: list[str]) -> int:
    """The process of one side: builds its engine, then answers each line of stdin with a line on stdout."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    # What vLLM prints belongs into the log: stdout carries the answers.
    os.dup2(2, 1)
    import torch
    import vllm

    from vllm_overlay.offline.engine import build_engine, shut_down

    llm = build_engine(args.model, engine_options)
    ends: dict[str, EndRound] = {
        "off": lambda outputs: None,
        "on": lambda outputs: llm.collective_rpc("overlay_flush"),
        NATIVE: wait_for_native_files,
    }
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{os.cpu_count()} CPU cores"
    print(json.dumps({"vllm": vllm.__version__, "torch": torch.__version__, "device": device}), file=answers)
    try:
        for line in sys.stdin:
            message = json.loads(line)
            if "end" in message:
                break
            seconds = _time_round(llm, Workload(*message["round"]), message["seed"], ends[args.serve_side])
            print(json.dumps({"seconds": seconds}), file=answers)
        counts = llm.collective_rpc("overlay_flush")[0] if args.serve_side == "on" else {}
    finally:
        shut_down(llm)
    print(json.dumps(counts), file=answers)
    return 0


def _time_round(llm: Any, workload: Workload, seed: int, end_round: EndRound) -> float:
    from vllm import SamplingParams

    generator = random.Random(seed)
    vocabulary = llm.llm_engine.model_config.get_vocab_size()
    prompts = [
        {"prompt_token_ids": generator.choices(range(5, vocabulary), k=workload.tokens_in)}
        for _ in range(workload.requests)
    ]
    params = SamplingParams(max_tokens=workload.tokens_out, temperature=0.0, ignore_eos=True, detokenize=False)
    started = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    end_round(outputs)
    seconds = time.perf_counter() - started
    remove_native_files(outputs)
    return seconds


def extract_natively(args: argparse.Namespace, folder: str) -> list[str]:
    """The engine options for vLLM's own extraction of the layers of --layers into this folder."""
    from vllm_overlay.layer_ids import resolve_layer_ids

    config = json.loads((Path(args.model) / "config.json").read_text())
    layer_ids = list(resolve_layer_ids(args.layers, config["num_hidden_layers"]))
    draft = {"hf_config": {"eagle_aux_hidden_state_layer_ids": layer_ids}}
    method = {"method": "extract_hidden_states", "num_speculative_tokens": 1, "draft_model_config": draft}
    connector = {
        "kv_connector": "ExampleHiddenStatesConnector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": folder},
    }
    return ["--speculative-config", json.dumps(method), "--kv-transfer-config", json.dumps(connector)]


def list_native_files(outputs: list[Any]) -> list[Path]:
    """The files of the requests that vLLM's own extraction wrote for; none for those of another side."""
    parameters = [output.kv_transfer_params for output in outputs]
    return [Path(each["hidden_states_path"]) for each in parameters if each]


def wait_for_native_files(outputs: list[Any]) -> None:
    """A file is written while its lock is held."""
    files = list_native_files(outputs)
    if len(files) < len(outputs):
        raise SystemExit(f"benchmark: vLLM wrote {len(files)} files of hidden states for {len(outputs)} requests")
    for file in files:
        with Path(f"{file}.lock").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH)


def remove_native_files(outputs: list[Any]) -> None:
    for file in list_native_files(outputs):
        file.unlink()
        Path(f"{file}.lock").unlink()


if __name__ == "__main__":
    sys.exit(main())
