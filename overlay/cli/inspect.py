"""`vllm-overlay inspect`: what is in a store."""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_overlay.errors import OverlayError

if TYPE_CHECKING:
    from vllm_overlay.store import Damage, LayerNorms, Store

HELP = "show what a store holds: records, rows, layers, sizes, norms by layer"

DEFAULT_SAMPLE = 64


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("store", metavar="STORE", help="folder of the store, or the URL of a remote one")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text (default: text)")
    parser.add_argument(
        "--plot", metavar="FILE.png", type=Path, help="draw the norms by layer into this file (default: no plot)"
    )
    parser.add_argument(
        "--verify",
        action="store_true",
        help="read every record again and compare it with its checksum (default: no); exit status 1 if one differs",
    )
    parser.add_argument(
        "--sample",
        metavar="N",
        type=_positive,
        default=DEFAULT_SAMPLE,
        help=f"records to measure the norms on (default: {DEFAULT_SAMPLE})",
    )


def run(args: argparse.Namespace) -> int:
    """Print the report. Returns 1 if --verify finds a damaged record. Raises OverlayError if the store cannot be read
    or the plot not drawn.
    """
    from vllm_overlay.store import Store, measure_norms

    with Store.open(args.store) as store:
        # First, and said at once: with a file that is cut short the norms cannot be measured.
        damages = verify(store) if args.verify else []
        for damage in damages:
            print(damage, file=sys.stderr)
        norms = measure_norms(store, args.sample)
        report = build_report(store, norms)
        if args.plot is not None:
            draw_norms(store, norms, args.plot)
    if args.verify:
        report["damaged"] = [asdict(damage) for damage in damages]
    print(json.dumps(report, indent=2, allow_nan=False) if args.json else format_report(report))
    return 1 if damages else 0


def build_report(store: Store, norms: LayerNorms | None) -> dict[str, Any]:
    """Everything that inspect says, as JSON values; `norms` is None if there is no complete record."""
    from vllm_overlay.store import summarize

    return {
        "store": str(store.path),
        **asdict(store.meta),
        **asdict(summarize(store)),
        "norms": None if norms is None else _without_nan(asdict(norms)),
    }


def format_report(report: dict[str, Any]) -> str:
    """The report as text, one fact a line."""
    facts = {
        "store": report["store"],
        "model": f"{report['model']} ({report['num_hidden_layers']} layers, hidden size {report['hidden_size']})",
        "fingerprint": report["model_fingerprint"],
        "captured with": f"vLLM {report['vllm_version']}, {report['runner']} runner",
        "layers": f"{', '.join(map(str, report['layer_ids']))} ({report['dtype']})",
        "records": f"{report['records']:,}: {report['complete']:,} complete, {report['incomplete']:,} incomplete, "
        f"{report['windows']:,} begin after position 0",
        "tokens": f"{report['prompt_tokens']:,} prompt, {report['generated_tokens']:,} generated",
        "rows": f"{report['rows_stored']:,} stored, {report['rows_in_records']:,} of them in records, "
        f"{report['row_references'] - report['rows_in_records']:,} more references to shared rows",
        "logs": f"{report['logs']:,}: {report['logs_open']:,} not closed, "
        f"{report['logs_unclean']:,} cut off by a crash ({report['rows_dropped']:,} rows dropped)",
        "on disk": f"{format_bytes(report['bytes_on_disk'])} (shards: {report['shards']:,})",
        "finish reasons": ", ".join(f"{reason} {count:,}" for reason, count in report["finish_reasons"].items())
        or "none",
    }
    if "damaged" in report:
        facts["verified"] = f"{report['records']:,} records, {len(report['damaged']):,} damaged"
    lines = [f"{name + ':':<16}{value}" for name, value in facts.items()]
    return "\n".join(lines + _format_norms(report["norms"]))


def _format_norms(norms: dict[str, Any] | None) -> list[str]:
    if norms is None:
        return ["no complete record: no norms by layer"]
    lines = [
        f"L2 norm of a token's hidden state (tokens: {norms['tokens']:,}, records: {norms['records']:,}):",
        f"{'layer':>8}{'mean':>12}{'5 %':>12}{'median':>12}{'95 %':>12}{'all zero':>10}{'not finite':>12}",
    ]
    for column, layer in enumerate(norms["layer_ids"]):
        values = "".join(f"{_format_norm(norms[name][column]):>12}" for name in ("mean", "p5", "median", "p95"))
        lines.append(f"{layer:>8}{values}{norms['zero_rows'][column]:>10,}{norms['non_finite_rows'][column]:>12,}")
    return lines


def _format_norm(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def format_bytes(count: float) -> str:
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:,.0f} {unit}" if unit == "bytes" else f"{count:,.1f} {unit}"
        count /= 1024
    return f"{count:,.1f} TiB"


def _without_nan(norms: dict[str, Any]) -> dict[str, Any]:
    """JSON has no NaN: a layer of which no sampled state is finite has no norm."""
    return {
        name: [None if isinstance(value, float) and math.isnan(value) else value for value in values]
        if isinstance(values, tuple)
        else values
        for name, values in norms.items()
    }


def verify(store: Store) -> list[Damage]:
    from vllm_overlay.progress import make_bar

    numbers = make_bar(range(len(store)), desc="verify", unit=" records")
    return [damage for damage in map(store.check, numbers) if damage is not None]


def draw_norms(store: Store, norms: LayerNorms | None, file: Path) -> None:
    """Norms by layer as a PNG: the mean and the 5th to 95th percentile. Raises OverlayError if it cannot be drawn."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.ticker import FixedLocator
    except ImportError as error:
        raise OverlayError("--plot needs matplotlib: pip install 'vllm-overlay[train]'") from error
    if norms is None:
        raise OverlayError(f"{store.path} has no complete record to plot")
    order = sorted(range(len(norms.layer_ids)), key=lambda column: norms.layer_ids[column])
    layers = [norms.layer_ids[column] for column in order]
    figure = Figure(figsize=(7.5, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.fill_between(
        layers, [norms.p5[c] for c in order], [norms.p95[c] for c in order], alpha=0.25, label="5th to 95th percentile"
    )
    axes.plot(layers, [norms.mean[c] for c in order], marker="o", label="mean")
    axes.set_title(
        f"{store.meta.model}: hidden states by layer\ntokens: {norms.tokens:,}, records: {norms.records:,}", fontsize=11
    )
    axes.set_xlabel("layer id (0: embedding output, k: after k decoder layers)")
    axes.set_ylabel("L2 norm of a token's hidden state")
    axes.xaxis.set_major_locator(FixedLocator(layers, nbins=20))
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    unfinished = file.with_name(file.name + ".new")
    try:
        figure.savefig(unfinished, format="png", dpi=150)
        unfinished.replace(file)
    except OSError as error:
        raise OverlayError(f"cannot write {file}: {error.strerror or error}") from error
    finally:
        unfinished.unlink(missing_ok=True)


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {number}")
    return number
