"""Hours of serving in minutes: `vllm serve` with capture under load, then every request against its record.

    python tools/soak.py                                    # 2,000 requests from 16 clients, in this environment's vLLM
    python tools/soak.py --requests 200 --stop-at 100       # SIGTERM in the middle of the load
    python tools/soak.py -- --api-server-count 2            # with more options of vLLM's

The model is the tests' random Llama. Requests have mixed lengths and share prefixes, half are streamed, a fifth is hung
up on, and the KV cache is so small that vLLM pre-empts; if its own counter says that it never did, the soak fails. The
server ends by SIGTERM. Then: every request that finished has exactly one record, complete or counted as incomplete,
with the tokens that its client sent and saw; others have at most one, as far as they came; a sample of the records is
what transformers computes; /metrics of each API server counted what is in the store; and no process grew in the last
half of the run by more than --max-growth above what it grows by in a plain vLLM, which is put under the same load first
(on a CPU, vLLM's worker alone grows for thousands of requests). Exits with 1 if one of these is not so.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from soak_load import Outcome, plan_requests, run_load
from soak_server import MemorySampler, Server, ServerError, make_environment
from tqdm import tqdm

LAYERS = (0, 2, 4)
# Of 32 tokens. 16 requests of up to 208 tokens would need up to 112.
KV_BLOCKS = 24
ENGINE = ["--dtype", "float32", "--enforce-eager", "--max-model-len", "256", "--block-size", "32"]
SEED = 1


def main() -> int:
    words, options = _split(sys.argv[1:])
    args = _make_parser().parse_args(words)
    with tempfile.TemporaryDirectory(prefix="vllm-overlay-soak-", dir=args.folder) as folder:
        try:
            report, faults = soak(Path(folder), args, options)
        except ServerError as error:
            print(f"soak: {error}", file=sys.stderr)
            return 1
    _print_table(report)
    for fault in faults[:20]:
        print(f"FAILED: {fault}")
    if args.output:
        args.output.write_text(json.dumps(report | {"faults": faults}, indent=2) + "\n")
    print(f"soak: {len(faults)} faults" if faults else "soak: everything is as it should be")
    return 1 if faults else 0


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=2000, help="how many (default: 2000)")
    parser.add_argument("--clients", type=int, default=16, help="how many send requests at once (default: 16)")
    parser.add_argument(
        "--stop-at", type=int, metavar="N", help="SIGTERM when so many have ended (default: at the end)"
    )
    parser.add_argument("--kv-blocks", type=int, default=KV_BLOCKS, help=f"of 32 tokens (default: {KV_BLOCKS})")
    parser.add_argument("--sample", type=int, default=100, help="records to compare with transformers (default: 100)")
    parser.add_argument("--max-growth", type=float, default=8.0, metavar="MIB", help="above plain vLLM's (default: 8)")
    parser.add_argument("--folder", type=Path, help="where the temporary store goes (default: the system's)")
    parser.add_argument("--output", type=Path, metavar="FILE.json", help="write the figures here as JSON too")
    return parser


def _split(words: list[str]) -> tuple[list[str], list[str]]:
    at = words.index("--") if "--" in words else len(words)
    return words[:at], words[at + 1 :]


def soak(folder: Path, args: argparse.Namespace, options: list[str]) -> tuple[dict[str, Any], list[str]]:
    """Serve, load, stop, check. Returns the figures and the faults. Errors: ServerError."""
    # The tiny model and its reference are the tests'.
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from tests.tiny_models import write_tiny_llama

    model = write_tiny_llama(folder / "model", layers=4, spread=0.05)
    engine = [*ENGINE, "--num-gpu-blocks-override", str(args.kv_blocks), *options]
    plain = measure_plain(model, engine, folder / "log", args) if args.stop_at is None else {}
    environment = make_environment(folder / "store", ",".join(map(str, LAYERS)))
    with Server(model, engine, environment, folder / "log") as server:
        server.wait_until_ready()
        served = serve(server, str(model), args)
    report, faults = check(folder, served, plain, args)
    return _describe(args, engine) | report, faults


def _describe(args: argparse.Namespace, engine: list[str]) -> dict[str, Any]:
    import torch
    import vllm

    stop_at = f" --stop-at {args.stop_at}" if args.stop_at else ""
    return {
        "command": f"python tools/soak.py --requests {args.requests} --clients {args.clients}{stop_at}",
        "engine_options": " ".join(engine),
        "date": time.strftime("%Y-%m-%d"),
        "versions": {"vllm": vllm.__version__, "torch": torch.__version__, "device": f"{os.cpu_count()} CPU cores"},
    }


def measure_plain(model: Path, engine: list[str], log: Path, args: argparse.Namespace) -> Mapping[str, list[int]]:
    """The memory of a vLLM without the overlay under the same load, by process. Errors: ServerError."""
    requests = plan_requests(args.requests, SEED)
    with Server(model, engine, make_environment(None, ""), log) as server:
        server.wait_until_ready()
        with tqdm(total=len(requests), unit="request", desc="plain") as progress, MemorySampler(server) as sampler:

            def tell(outcome: Outcome) -> None:
                progress.update()

            run_load(server.url, str(model), requests, args.clients, tell)
        server.terminate()
        server.wait()
    return sampler.samples


@dataclasses.dataclass(frozen=True)
class Served:
    """What was seen of the server: outcomes, the last scrape, what each API server said after it (none if SIGTERM came
    in the middle), and the memory of its processes, sample by sample.
    """

    outcomes: list[Outcome]
    scraped: Mapping[str, float]
    scraped_each: Mapping[str, Mapping[str, float]]
    memory: Mapping[str, list[int]]
    load_s: float
    stop_s: float


def serve(server: Server, model: str, args: argparse.Namespace) -> Served:
    """Put the load on the server and stop it by SIGTERM, after the last request or when `--stop-at` have ended."""
    requests = plan_requests(args.requests, SEED)
    scrapes: list[Mapping[str, float]] = []
    with tqdm(total=len(requests), unit="request", desc="capture") as progress, MemorySampler(server) as sampler:

        def tell(outcome: Outcome) -> None:
            progress.update()
            if progress.n == args.stop_at:
                scrapes.append(server.scrape())
                server.terminate()

        started = time.monotonic()
        outcomes = run_load(server.url, model, requests, args.clients, tell)
        load_s = time.monotonic() - started
    each: Mapping[str, Mapping[str, float]] = {}
    if not scrapes:
        scrapes.append(server.scrape_when(lambda now: not now["vllm_overlay_capture_live_requests"]))
        each = server.scrape_each()
        server.terminate()
    started = time.monotonic()
    server.wait()
    return Served(outcomes, scrapes[-1], each, sampler.samples, load_s, time.monotonic() - started)


def check(
    folder: Path, served: Served, plain: Mapping[str, list[int]], args: argparse.Namespace
) -> tuple[dict[str, Any], list[str]]:
    """The figures and the faults of what was served. `plain`: the memory of a vLLM without capture, empty for none."""
    import soak_checks as checks

    from tests.live.runs import Reference
    from vllm_overlay.store import Store

    reference = Reference(folder / "model")
    interrupted = args.stop_at is not None
    with Store.open(folder / "store") as store:
        recorded = checks.sort_records(store, served.outcomes)
        compared = checks.compare_sample(
            recorded, args.sample, SEED, lambda tokens: reference.states(tokens)[:, list(LAYERS)]
        )
        faults = [*checks.find_wrong_records(recorded), *checks.find_wrong_states(compared, args.sample)]
        for name, scraped in served.scraped_each.items():
            faults += [f"{name}: {fault}" for fault in checks.find_wrong_counts(scraped, store)]
        if not interrupted:
            faults += checks.find_cut_off(recorded)
    preemptions = served.scraped["vllm:num_preemptions_total"]
    if not preemptions:
        faults.append("vLLM pre-empted no request: use fewer --kv-blocks")
    growths, plain_growths = checks.measure_growth(served.memory), checks.measure_growth(plain)
    if plain_growths:
        faults += checks.find_grown(growths, plain_growths, args.max_growth)
    report = {
        "seconds_of_load": round(served.load_s, 1),
        "seconds_from_sigterm_to_exit": round(served.stop_s, 1),
        "counts": recorded.count() | {"pre-emptions": int(preemptions)},
        "metrics": checks.read_counters(served.scraped),
        "metrics_of_each_server": {name: checks.read_counters(one) for name, one in served.scraped_each.items()},
        "compared_with_transformers": dataclasses.asdict(compared),
        "memory_mib": [dataclasses.asdict(growth) for growth in growths],
        "memory_mib_of_plain_vllm": [dataclasses.asdict(growth) for growth in plain_growths],
        "may_grow_more_than_plain_by_mib": args.max_growth,
    }
    return report, faults


def _print_table(report: Mapping[str, Any]) -> None:
    rows = {
        **report["counts"],
        "seconds of load": report["seconds_of_load"],
        "seconds from SIGTERM to exit": report["seconds_from_sigterm_to_exit"],
        **{f"/metrics: {name}": value for name, value in report["metrics"].items()},
        "API servers that answered": len(report["metrics_of_each_server"]),
        "records compared with transformers": report["compared_with_transformers"]["records"],
        "largest difference": f"{report['compared_with_transformers']['worst']:.2g}",
    }
    for name, kind in (("memory_mib", ""), ("memory_mib_of_plain_vllm", "plain ")):
        for growth in report[name]:
            halves = f"{growth['first_half']:.1f}, {growth['last_half']:.1f}, {growth['grown']:+.1f}"
            rows[f"MiB of {kind}{growth['process']}: halves, growth in the last"] = halves
    width = max(map(len, rows))
    for name, value in rows.items():
        print(f"{name:{width}}  {value}")


if __name__ == "__main__":
    sys.exit(main())
