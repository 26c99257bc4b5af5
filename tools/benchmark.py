"""What capture costs: tokens/s of the same vLLM with capture on, over off, for prefill and for decode, in one run.

usage: python tools/benchmark.py --model MODEL [--prefill 64x256] [--decode 32x64+128] [--rounds 6] [--native]
       [--disk FOLDER] [--replicas 1] [--output FILE.json] [-- vLLM engine options]

Two engines, each in a process of its own, one with capture on and one without, are alive at the same time and take
turns: off, on, on, off, and so on. A shared machine changes its speed by a third within minutes, which comparing one
engine's rounds with another's five minutes later would measure; rounds that lie side by side see the same machine. Both
engines of a pair get the same prompts, every pair fresh ones (the prefix cache finds nothing). The first pair warms up
and is not counted. A round with capture ends when its records are in the store. The parts of a round are given as well:
before the first output, each step after it, what was slower than the usual step, and what came after the last token.
The figure is the median of the pairs' quotients. The stores are written below --store (default: a temporary folder) and
removed. At the end, without vLLM, what the accounting of such a decode step takes on the host, in microseconds:
tools/step_cost.py says of which parts. With vLLM's `--kv-cache-memory-bytes`, and a `--gpu-memory-utilization` that
leaves room for all, the engines start at the same time, otherwise one after the other.

With --replicas each side is so many engines, each on a GPU of its own, which share out the requests and write one
store.
With --native a further engine takes its turn, with vLLM's own `extract_hidden_states` (from 0.22 on) for the same
layers: it keeps the rows of the prompts only. Its round ends when its files are written; they are then removed.
With --disk a further engine captures into a store in that folder, where --store is memory (/dev/shm). It takes part in
the first --disk-rounds pairs, because nothing of its store is removed before the end.
"""

from __future__ import annotations

import argparse
import fcntl
import itertools
import json
import os
import random
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SIDES = ("off", "on")
DISK = "disk"
MEMORY_OPTION = "--kv-cache-memory-bytes"  # from 0.11 on
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


@dataclass(frozen=True)
class Round:
    """One call of generate: its tokens, its seconds, and the seconds until what it captured was on disk.

    `step_ends`: when the caller had each step's output, in seconds from the beginning.
    """

    tokens: int
    seconds: float
    seconds_after: float
    step_ends: tuple[float, ...]

    @property
    def speed(self) -> float:
        """Tokens/s, all of it counted in."""
        return self.tokens / (self.seconds + self.seconds_after)

    def split(self) -> dict[str, float]:
        """Milliseconds of its parts: they add up to the round, with each of the later steps at their median."""
        gaps = [end - start for start, end in itertools.pairwise(self.step_ends)]
        median = statistics.median(gaps) if gaps else 0.0
        parts = {
            "to_the_first_output": self.step_ends[0],
            "a_step": median,
            "steps_beyond_their_median": sum(gaps) - median * len(gaps),
            "from_the_last_output_to_the_answer": self.seconds - self.step_ends[-1],
            "after_the_last_token": self.seconds_after,
        }
        return {part: 1000 * seconds for part, seconds in parts.items()}


class Side:
    """An engine in a process of its own, or one a replica, which run a round when they are told to."""

    def __init__(self, name: str, folder: str, args: argparse.Namespace, engine_options: list[str]) -> None:
        store = f"{folder}/{name}"
        environment = {key: value for key, value in os.environ.items() if not key.startswith("VLLM_OVERLAY")}
        if name == NATIVE:
            engine_options = [*engine_options, *extract_natively(args, store)]
        if name in ("on", DISK):
            environment |= {"VLLM_OVERLAY": "1", "VLLM_OVERLAY_CAPTURE": store, "VLLM_OVERLAY_LAYERS": args.layers}
        if name == DISK:  # it may start while the engine with the same graphs compiles them
            environment["VLLM_CACHE_ROOT"] = f"{folder}/cache"
        command = [sys.executable, __file__, "--serve-side", name, "--model", args.model, "--", *engine_options]
        self._processes = [
            subprocess.Popen(
                command,
                env=environment | replica,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
            for replica in list_replicas(args.replicas)
        ]
        self.facts: dict[str, Any] = {}  # the versions that it runs on, when it is ready

    def wait_until_ready(self) -> None:
        """Until its engine is there; it may be called again."""
        if not self.facts:
            self.facts = self._read()[0]

    def run_round(self, workload: Workload, seed: int) -> Round:
        """The requests are shared out evenly, and the slowest replica's time counts."""
        each = workload.requests // len(self._processes)
        self._ask(
            [
                {"round": [each, workload.tokens_in, workload.tokens_out], "seed": 100 * seed + rank}
                for rank in range(len(self._processes))
            ]
        )
        times = self._read()
        slowest = max(times, key=lambda time: time["seconds"])
        ended = max(time["seconds"] + time["seconds_after"] for time in times)
        return Round(
            workload.counted_tokens, slowest["seconds"], ended - slowest["seconds"], tuple(slowest["step_ends"])
        )

    def end(self) -> dict[str, Any]:
        """Shut the engines down; what the capture sessions counted, together."""
        self._ask([{"end": True} for _ in self._processes])
        counts = self._read()
        for process in self._processes:
            process.wait()
        return {name: sum(count[name] for count in counts) for name in counts[0]}

    def __enter__(self) -> Side:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.terminate()
                process.wait()
            # An engine that starts does not hear of its front end's end, and would keep the GPU.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

    def _ask(self, messages: list[dict[str, Any]]) -> None:
        for process, message in zip(self._processes, messages, strict=True):
            assert process.stdin is not None
            process.stdin.write(json.dumps(message) + "\n")
            process.stdin.flush()

    def _read(self) -> list[dict[str, Any]]:
        answers = []
        for process in self._processes:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                raise SystemExit(f"benchmark: an engine ended with exit status {process.wait()}; its log is above")
            answers.append(json.loads(line))
        return answers


def list_replicas(count: int) -> list[dict[str, str]]:
    """The environment of each replica: its GPU. vLLM 0.24 refuses `VLLM_DP_SIZE` for a dense model outside a server,
    whose data-parallel engines have nothing to do with each other either."""
    return [{}] if count == 1 else [{"CUDA_VISIBLE_DEVICES": str(rank)} for rank in range(count)]


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
    parser.add_argument("--replicas", type=int, default=1, help="engines on each side, one a GPU (default: 1)")
    parser.add_argument("--native", action="store_true", help="measure vLLM's own extract_hidden_states as well")
    parser.add_argument("--disk", metavar="FOLDER", help="measure capture into a store in this folder as well")
    parser.add_argument("--disk-rounds", type=int, default=2, help="pairs that it is counted in (default: 2)")
    parser.add_argument("--serve-side", choices=(*SIDES, NATIVE, DISK), help=argparse.SUPPRESS)
    args = parser.parse_args(words)
    if args.serve_side:
        return _serve(args, engine_options)
    if min(args.rounds, args.disk_rounds) < 1:
        parser.error("--rounds and --disk-rounds count from 1")
    for report in _compare(args, engine_options):
        text = json.dumps(report, indent=2)
        if args.output:
            args.output.write_text(text + "\n")
    print(text)
    return 0


def _split(words: list[str]) -> tuple[list[str], list[str]]:
    at = words.index("--") if "--" in words else len(words)
    return words[:at], words[at + 1 :]


def _compare(args: argparse.Namespace, engine_options: list[str]) -> Iterator[dict[str, Any]]:
    """What is known, after each workload and at the end: a run on a borrowed machine may be cut off."""
    # Here, because the process of the side without capture shall load nothing of ours.
    from step_cost import measure

    command = shlex.join(["python", *sys.argv]).replace(str(Path.home()), "~")
    report: dict[str, Any] = {"command": command, "date": time.strftime("%Y-%m-%d")}
    with ExitStack() as stack:
        folders = dict.fromkeys((*SIDES, *([NATIVE] if args.native else [])), make_scratch(stack, args.store))
        if args.disk:
            folders[DISK] = make_scratch(stack, args.disk)
        sides: dict[str, Side] = {}
        for name, folder in folders.items():
            sides[name] = stack.enter_context(Side(name, folder, args, engine_options))
            # On a GPU, vLLM measures free memory while it starts, unless it is told what the KV cache is to take.
            if not any(option.partition("=")[0] == MEMORY_OPTION for option in engine_options):
                sides[name].wait_until_ready()
        for side in sides.values():
            side.wait_until_ready()
        report["versions"] = sides["on"].facts
        for name in ("prefill", "decode"):
            workload = Workload.parse(getattr(args, name))
            report[name] = _compare_workload(name, workload, sides, args.rounds, args.disk_rounds)
            yield report
        report["capture"] = [side.end() for side in sides.values()][SIDES.index("on")]
        decode = Workload.parse(args.decode)
        costs = measure(Path(folders["on"]) / "step-cost", decode.requests, decode.tokens_in, decode.tokens_out)
        report["host_microseconds_per_decode_step"] = {part: round(cost, 1) for part, cost in costs.items()}
    yield report


def make_scratch(stack: ExitStack, parent: str | None) -> str:
    """A temporary folder that is removed with the stack."""
    return stack.enter_context(tempfile.TemporaryDirectory(prefix="vllm-overlay-benchmark-", dir=parent))


def _compare_workload(
    name: str, workload: Workload, sides: dict[str, Side], rounds: int, disk_rounds: int
) -> dict[str, Any]:
    pairs = []
    for number in range(rounds + 1):
        playing = [side for side in sides if side != DISK or number <= disk_rounds]
        order = playing if number % 2 else playing[::-1]
        pair = {side: sides[side].run_round(workload, seed=1000 * len(name) + number) for side in order}
        speeds = {side: pair[side].speed for side in pair}
        print(f"{name}, pair {number}: {speeds}, {speeds['on'] / speeds['off']:.3f}", file=sys.stderr)
        for side, round_played in pair.items():
            parts = ", ".join(f"{part} {milliseconds:.1f}" for part, milliseconds in round_played.split().items())
            print(f"    milliseconds {side}: {parts}", file=sys.stderr)
        pairs.append(pair)
    counted = pairs[1:]
    report: dict[str, Any] = {}
    for side in sides:
        played = [pair for pair in counted if side in pair]
        report[f"tokens_per_second_{side}"] = round(statistics.median(pair[side].speed for pair in played), 1)
        splits = [pair[side].split() for pair in played]
        report[f"milliseconds_{side}"] = {
            part: round(statistics.median(split[part] for split in splits), 2) for part in splits[0]
        } | {"steps": statistics.median(len(pair[side].step_ends) for pair in played)}
        report[f"rounds_{side}"] = [round(pair[side].speed, 1) for pair in played]
        if side == "off":
            continue
        quotients = [pair[side].speed / pair["off"].speed for pair in played]
        report[f"{side}_over_off"] = round(statistics.median(quotients), 4)
        report[f"{side}_over_off_of_each_pair"] = [round(quotient, 3) for quotient in quotients]
        report[f"milliseconds_after_the_last_token_{side}"] = [
            round(1000 * pair[side].seconds_after, 1) for pair in played
        ]
    return report


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
        DISK: lambda outputs: llm.collective_rpc("overlay_flush"),
        NATIVE: wait_for_native_files,
    }
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{os.cpu_count()} CPU cores"
    print(json.dumps({"vllm": vllm.__version__, "torch": torch.__version__, "device": device}), file=answers)
    try:
        for line in sys.stdin:
            message = json.loads(line)
            if "end" in message:
                break
            times = _time_round(llm, Workload(*message["round"]), message["seed"], ends[args.serve_side])
            print(json.dumps(times), file=answers)
        counts = llm.collective_rpc("overlay_flush")[0] if args.serve_side in ("on", DISK) else {}
    finally:
        shut_down(llm)
    print(json.dumps(counts), file=answers)
    return 0


def _time_round(llm: Any, workload: Workload, seed: int, end_round: EndRound) -> dict[str, Any]:
    from vllm import SamplingParams

    generator = random.Random(seed)
    vocabulary = llm.llm_engine.model_config.get_vocab_size()
    prompts = [
        {"prompt_token_ids": generator.choices(range(5, vocabulary), k=workload.tokens_in)}
        for _ in range(workload.requests)
    ]
    params = SamplingParams(max_tokens=workload.tokens_out, temperature=0.0, ignore_eos=True, detokenize=False)
    with noting_steps(llm.llm_engine) as step_ends:
        started = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        answered = time.perf_counter()
    end_round(outputs)
    ended = time.perf_counter()
    remove_native_files(outputs)
    return {
        "seconds": answered - started,
        "seconds_after": ended - answered,
        "step_ends": [end - started for end in step_ends],
    }


@contextmanager
def noting_steps(engine: Any) -> Iterator[list[float]]:
    """When each step's output was there, until the end of the block; `generate` calls `step` for each."""
    ends: list[float] = []
    step = engine.step

    def timed_step() -> Any:
        outputs = step()
        ends.append(time.perf_counter())
        return outputs

    engine.step = timed_step
    try:
        yield ends
    finally:
        del engine.step


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
