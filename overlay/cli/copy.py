"""`vllm-overlay copy`: a new store of some records of one store, or of several stores."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

from vllm_overlay.cli.inspect import format_bytes
from vllm_overlay.cli.output import local_folder

HELP = "make a store of some records of others, or of all of several; whole files of rows are shared, not copied"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "stores", nargs="+", metavar="STORE", help="stores of the same layers of one model, remote ones by URL"
    )
    parser.add_argument(
        "-o", "--output", required=True, metavar="STORE", type=local_folder, help="must not exist, or be empty"
    )
    parser.add_argument(
        "--tag", action="append", metavar="TAG", help="only records with this tag; may be given again (default: any)"
    )
    parser.add_argument("--complete", action="store_true", help="only complete records (default: all)")
    parser.add_argument(
        "--sample",
        type=_parse_fraction,
        default=1.0,
        metavar="FRACTION",
        help="of the requests, by a hash of their ids: the same ones every time, 0 to 1 (default: 1)",
    )
    parser.add_argument(
        "--records",
        type=_parse_range,
        default=(0, None),
        metavar="A:B",
        help="only records A to B - 1, counted from 0 through all stores; 900: is all from 900 on (default: all)",
    )


def run(args: argparse.Namespace) -> int:
    """Copy. Raises OverlayError if a store cannot be read, they do not fit, or the output is in use."""
    from vllm_overlay.store import Store
    from vllm_overlay.store.copying import Choice, copy_records

    tags = None if args.tag is None else frozenset(args.tag)
    choice = Choice(tags, args.complete, args.sample, *args.records)
    with ExitStack() as opened:
        stores = [opened.enter_context(Store.open(path)) for path in args.stores]
        done = copy_records(stores, args.output, choice, _show_progress)
    print(
        f"{done.records:,} records in {args.output}, {done.left_out:,} left out; rows: {format_bytes(done.shared)} in "
        f"files shared with the old stores, {format_bytes(done.written)} written"
    )
    return 0


def _show_progress(items: Iterable[Any], total: int) -> Iterable[Any]:
    from vllm_overlay.progress import make_bar

    shown: Iterable[Any] = make_bar(items, total=total, desc="copy", unit=" shards")
    return shown


def _parse_fraction(text: str) -> float:
    try:
        fraction = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number, 0 to 1, not {text!r}") from None
    if not 0 <= fraction <= 1:
        raise argparse.ArgumentTypeError(f"must be 0 to 1, not {text}")
    return fraction


def _parse_range(text: str) -> tuple[int, int | None]:
    first, colon, end = text.partition(":")
    try:
        if not colon or text.startswith("-"):
            raise ValueError
        return int(first or 0), int(end) if end else None
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be A:B, such as 0:900 or 900:, not {text!r}") from None
