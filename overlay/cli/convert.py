"""`vllm-overlay convert`: a store from and to vLLM's and speculators' files, one a record."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_overlay.cli.output import local_folder
from vllm_overlay.errors import OverlayError
from vllm_overlay.model_shape import LAYERS, find_config, find_text_config, read_config, read_size
from vllm_overlay.urls import is_url

if TYPE_CHECKING:
    from vllm_overlay.store import StoreMeta
    from vllm_overlay.store.record_files import RecordFile

HELP = "write a store as vLLM's or speculators' files, or make one of them"

LAYOUTS = ("vllm", "speculators")
# The names of record_files.ID_MEANINGS, which would import torch.
ID_MEANINGS = ("residual", "after-layer")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source", metavar="STORE|DIR", help="a store with --to, its URL if it is remote; a folder of files with --from"
    )
    parser.add_argument(
        "-o", "--output", required=True, metavar="DIR|STORE", type=local_folder, help="must not exist, or be empty"
    )
    way = parser.add_mutually_exclusive_group(required=True)
    way.add_argument("--to", choices=LAYOUTS, help="write the store's complete records as files of this layout")
    way.add_argument(
        "--from",
        dest="from_",
        choices=LAYOUTS,
        help="make a store of the files of this layout; of files of others without a loss mask every token counts in "
        "the loss, because they do not say where the prompt ends",
    )
    parser.add_argument(
        "--ids",
        choices=ID_MEANINGS,
        default="residual",
        help="what the files' layer ids mean: residual, k decoder layers were applied, 0 is the embedding output "
        "(vLLM, speculators 0.9); after-layer, the output of layer k counted from 0 (speculators 0.3, SpecForge), so "
        "that 1,2,3 are 2,3,4 in the store; files of ours say it themselves (default: residual)",
    )
    parser.add_argument(
        "--layers",
        metavar="IDS",
        type=_parse_ids,
        help="with --from: the files' layers in the order of their columns, "
        "for example 2,15,27,30 (default: as the files say)",
    )
    parser.add_argument(
        "--model",
        metavar="MODEL",
        type=Path,
        help="with --from: folder of the target whose states these are (default: as the files say)",
    )


def run(args: argparse.Namespace) -> int:
    """Convert. Raises OverlayError if a file or the store cannot be read, or the output is in use."""
    if args.to is not None:
        return _write_files(args)
    return _make_store(args)


def _write_files(args: argparse.Namespace) -> int:
    from vllm_overlay.store import Store
    from vllm_overlay.store.record_files import write_record_files

    if args.layers is not None or args.model is not None:
        raise OverlayError("--layers and --model go with --from: a store says which layers it holds, and of what")
    with Store.open(args.source) as store:
        done = write_record_files(store, args.output, args.to, args.ids, show_progress)
    print(f"{done.records:,} records written to {args.output}, {done.incomplete:,} incomplete ones left out")
    if done.windows:
        print(
            f"{done.windows:,} records left out that begin after position 0 of their requests: speculators would train "
            f"them from position 0"
        )
    return 0


def _make_store(args: argparse.Namespace) -> int:
    from vllm_overlay.store.new_folder import refuse_nested
    from vllm_overlay.store.record_files import find_record_files, read_loss_masks, read_record_file, write_store

    source = Path(args.source)
    if is_url(args.source):
        raise OverlayError(
            f"{args.source} is remote: files are converted from a folder of this machine, copy them to one"
        )
    refuse_nested(args.output, [source])
    files = find_record_files(source, args.from_)
    meta = _find_meta(args, read_record_file(files[0]))
    masks = read_loss_masks(source, files) if args.from_ == "speculators" else None
    done = write_store(files, args.output, meta, masks, show_progress)
    print(f"{done.records:,} records in {args.output}, layers {', '.join(map(str, meta.layer_ids))}")
    if done.without_prompt:
        print(
            f"{done.without_prompt:,} of the files have no loss mask and do not say where the prompt ends: all of "
            f"their tokens count in the loss"
        )
    return 0


def _find_meta(args: argparse.Namespace, first: RecordFile) -> StoreMeta:
    """What is true of all rows: as files of ours say, or by the first file and the target's folder."""
    from vllm_overlay.store import StoreMeta
    from vllm_overlay.store.record_files import find_layer_ids

    layer_ids = find_layer_ids(first, args.layers, args.ids)
    if args.model is not None:
        facts = _read_model(args.model)
    elif first.store_meta is not None:
        facts = asdict(first.store_meta)
    else:
        raise OverlayError(f"{first.path} does not say whose states it holds: name the target's folder with --model")
    shown = {
        "layer_ids": layer_ids,
        "hidden_size": first.hidden_states.shape[2],
        "dtype": str(first.hidden_states.dtype).removeprefix("torch."),
    }
    return StoreMeta(**{**facts, **shown})


def _read_model(model: Path) -> dict[str, Any]:
    from vllm_overlay.fingerprint import fingerprint_model

    file = find_config(model)
    layers = read_size(find_text_config(read_config(file))[1], LAYERS)
    if layers is None:
        raise OverlayError(f"{file} has no {LAYERS[0]!r}: cannot tell how many layers the target has")
    try:
        fingerprint = fingerprint_model(str(file.parent), {})
    except OSError as error:
        raise OverlayError(f"cannot read the weights in {file.parent}: {error}") from error
    return {
        "num_hidden_layers": layers,
        "model": str(file.parent),
        "model_fingerprint": fingerprint,
        "vllm_version": "unknown",
        "runner": "unknown",
    }


def show_progress(items: Iterable[Any], total: int) -> Iterable[Any]:
    from vllm_overlay.progress import make_bar

    shown: Iterable[Any] = make_bar(items, total=total, desc="convert", unit=" records")
    return shown


def _parse_ids(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(word) for word in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"not layer ids with commas between: {text!r}") from None
