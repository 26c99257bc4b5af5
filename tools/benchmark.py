"""What capture costs: tokens/s of the same vLLM with capture on, over off, for prefill and for decode, in one run.

usage: python tools/benchmark.py --model MODEL [--prefill 64x256] [--decode 32x64+128] [--rounds 3] [--output FILE.json]
       [-- vLLM engine options]

Each side is an engine in a process of its own, so that neither has anything of the other. Every round is a fresh set of
prompts (the prefix cache finds nothing), the first round warms up and is not counted, and the median of the others is
taken, and the best beside it: on a shared machine rounds of one engine differ by a tenth. Sides run in the order off,
on, off, on: what drifts on the machine meets both. The stores are written below --store (default: a temporary folder)
and removed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any


def main() -> int:
    words, engine_options = _split(sys.argv[1:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--prefill", default="64x256", metavar="REQUESTSxTOKENS", help="default: 64x256")
    parser.add_argument("--decode", default="32x64+128", metavar="REQUESTSxIN+OUT", help="default: 32x64+128")
    parser.add_argument("--rounds", type=int, default=3, help="rounds that are counted, a side (default: 3)")
    parser.add_argument("--sides", default="off,on,off,on", help="engines, in this order (default: off,on,off,on)")
    parser.add_argument("--layers", default="eagle3", help="layers to capture (default: eagle3)")
    parser.add_argument("--store", help="folder for the stores (default: a temporary one)")
    parser.add_argument("--output", type=Path, help="write the figures here as JSON too")
    parser.add_argument("--side", choices=("off", "on"), help=argparse.SUPPRESS)
    args = parser.parse_args(words)
    if args.side:
        print(json.dumps(_measure_side(args, engine_options)))
        return 0
    report = _compare(args, engine_options)
    text = json.dumps(report, indent=2)
    print(text)
    if args.output:
        args.output.write_text(text + "\n")
    return 0


def _split(words: list[str]) -> tuple[list[str], list[str]]:
    at = words.index("--") if "--" in words else len(words)
    return words[:at], words[at + 1 :]


def _compare(args: argparse.Namespace, engine_options: list[str]) -> dict[str, Any]:
    results: dict[str, list[dict[str, Any]]] = {"off": [], "on": []}
    with tempfile.TemporaryDirectory(prefix="vllm-overlay-benchmark-", dir=args.store) as folder:
        for number, side in enumerate(args.sides.split(",")):
            results[side].append(_run_side(side, f"{folder}/store-{number}", engine_options))
            print(f"{side}: {json.dumps(results[side][-1])}", file=sys.stderr)
    report: dict[str, Any] = {
        "command": " ".join(["python", *sys.argv]),
        "date": time.strftime("%Y-%m-%d"),
        "versions": results["on"][0]["versions"],
        "capture": results["on"][0]["capture"],
    }
    for workload in ("prefill", "decode"):
        rounds = {side: [r for run in results[side] for r in run[workload]] for side in ("off", "on")}
        off, on = (statistics.median(rounds[side]) for side in ("off", "on"))
        report[workload] = {
            "tokens_per_second_off": round(off, 1),
            "tokens_per_second_on": round(on, 1),
            "on_over_off": round(on / off, 4),
            "best_on_over_off": round(max(rounds["on"]) / max(rounds["off"]), 4),
            "rounds_off": [round(r, 1) for r in rounds["off"]],
            "rounds_on": [round(r, 1) for r in rounds["on"]],
        }
    return report


def _run_side(side: str, store: str, engine_options: list[str]) -> dict[str, Any]:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("VLLM_OVERLAY")}
    words = [word for word in sys.argv[1:] if word not in ("--side", side)]
    at = words.index("--") if "--" in words else len(words)
    layers = words[words.index("--layers") + 1] if "--layers" in words[:at] else "eagle3"
    if side == "on":
        environment |= {"VLLM_OVERLAY": "1", "VLLM_OVERLAY_CAPTURE": store, "VLLM_OVERLAY_LAYERS": layers}
    command = [sys.executable, __file__, *words[:at], "--side", side, *words[at:]]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"the engine with capture {side} failed with exit status {done.returncode}")
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def _measure_side(args: argparse.Namespace, engine_options: list[str]) -> dict[str, Any]:
    import torch
    import vllm

    from vllm_overlay.offline.engine import build_engine, shut_down

    llm = build_engine(args.model, engine_options)
    try:
        vocabulary = llm.llm_engine.model_config.get_vocab_size()
        requests, length = map(int, args.prefill.split("x"))
        prefill = [_time_round(llm, requests, length, 1, vocabulary, r) for r in range(args.rounds + 1)]
        requests, lengths = args.decode.split("x")
        into, out = map(int, lengths.split("+"))
        decode = [_time_round(llm, int(requests), into, out, vocabulary, r + 100) for r in range(args.rounds + 1)]
        capture = llm.collective_rpc("overlay_flush")[0] if args.side == "on" else None
    finally:
        shut_down(llm)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{os.cpu_count()} CPU cores"
    return {
        "prefill": prefill[1:],
        "decode": decode[1:],
        "capture": capture,
        "versions": {"vllm": vllm.__version__, "torch": torch.__version__, "device": device},
    }


def _time_round(llm: Any, requests: int, into: int, out: int, vocabulary: int, seed: int) -> float:
    """Tokens/s of one call of generate: prompt tokens where one token is generated, generated tokens otherwise."""
    from vllm import SamplingParams

    generator = random.Random(seed)
    prompts = [{"prompt_token_ids": generator.choices(range(5, vocabulary), k=into)} for _ in range(requests)]
    params = SamplingParams(max_tokens=out, temperature=0.0, ignore_eos=True, detokenize=False)
    started = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - started
    return requests * (into if out == 1 else out) / seconds


if __name__ == "__main__":
    sys.exit(main())
