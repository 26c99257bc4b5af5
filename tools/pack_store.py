"""A store's records again in float8, and what that saves and changes: bytes, and the error by layer.

usage: python tools/pack_store.py STORE -o FOLDER [--model MODEL] [--json FILE]

Takes the complete records of STORE, which holds rows in another dtype, and writes them with the same requests, tokens,
tags and masks into FOLDER, which must be new: to train on both and compare. Rows that records shared are written once
for each of them. Errors are those of the rows as they are read from FOLDER again:

    rms      of all numbers of the layer: root of the mean squared error, over that of the numbers themselves
    largest  of any number, over the largest absolute value of its row

With --model, a local folder of the target, also what its final norm and head make of the last layer's rows as captured
and as packed: at how many positions the first choice is the same, and the mean KL divergence, in nats, of what packed
rows predict from what captured ones do.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from vllm_overlay.eagle3.target import Target, load_target
from vllm_overlay.errors import OverlayError
from vllm_overlay.store import PendingRecord, Record, Store, StoreError, StoreWriter, float8, pack_rows
from vllm_overlay.store.new_folder import new_folder, refuse_nested

RECORDS_PER_COMMIT = 64
ROWS_AT_A_TIME = 256  # each makes two rows of logits, a number for each word of the vocabulary


def pack_store(source: Store, folder: Path) -> None:
    numbers = source.complete_numbers()
    if source.meta.is_packed or not numbers:
        raise StoreError(f"{source.path} is in float8 already, or has no complete record: there is nothing to pack")
    refuse_nested(folder, [source.path])
    meta = replace(source.meta, dtype=float8.DTYPE)
    with new_folder(folder) as unfinished, StoreWriter.open(unfinished, meta) as writer:
        waiting: list[PendingRecord] = []
        for number in tqdm(numbers, desc="pack", unit=" records", disable=None):
            record = source[number]
            waiting.append(_make_record(record, writer.append(pack_rows(record.hidden_states))))
            if len(waiting) == RECORDS_PER_COMMIT:
                writer.commit(waiting)
                waiting = []
        writer.commit(waiting)


def _make_record(record: Record, first: int) -> PendingRecord:
    tokens = len(record.token_ids)
    return PendingRecord(
        request_id=record.request_id,
        token_ids=record.token_ids.numpy(),
        rows=np.arange(first, first + tokens, dtype=np.int64),
        num_prompt_tokens=record.num_prompt_tokens,
        complete=True,
        finish_reason=record.finish_reason,
        tag=record.tag,
        loss_mask=None if record.loss_mask is None else record.loss_mask.numpy(),
        first_position=record.first_position,
    )


def compare(source: Store, packed: Store) -> dict[str, Any]:
    """Bytes of a token's rows in both, and the errors by layer."""
    squares = torch.zeros(2, len(source.layer_ids), dtype=torch.float64)  # of the errors, of the numbers
    largest = torch.zeros(len(source.layer_ids), dtype=torch.float64)
    tokens = 0
    for was, now in _pair(source, packed):
        error = (now - was).abs()
        squares += torch.stack([(each**2).sum(dim=(0, 2)) for each in (error, was)])
        largest = torch.maximum(largest, (error / was.abs().amax(dim=-1, keepdim=True)).amax(dim=(0, 2)))
        tokens += len(was)
    return {
        "model": Path(source.meta.model).name,
        "tokens": tokens,
        "dtype": source.meta.dtype,
        "layer_ids": source.layer_ids,
        "bytes a token": source.meta.row_bytes,
        "bytes a token in float8": packed.meta.row_bytes,
        "rms": (squares[0] / squares[1]).sqrt().tolist(),
        "largest": largest.tolist(),
    }


def load_target_of(source: Store, model: Path) -> Target:
    """Errors: OverlayError if the model is not one that the store can be of, or the store has not its last layer."""
    target, meta = load_target(model), source.meta
    for name, of_model, of_store in (
        ("layers", target.config.num_hidden_layers, meta.num_hidden_layers),
        ("hidden size", target.config.hidden_size, meta.hidden_size),
    ):
        if of_model != of_store:
            raise OverlayError(f"{model} is not the target of {source.path}: its {name} {of_model}, not {of_store}")
    if meta.num_hidden_layers not in meta.layer_ids:
        raise OverlayError(
            f"{source.path} has layers {list(meta.layer_ids)}, without {meta.num_hidden_layers}, the last"
        )
    return target


def compare_heads(source: Store, packed: Store, target: Target) -> dict[str, Any]:
    """What the target's head makes of the last layer's rows in both."""
    column = source.layer_ids.index(target.config.num_hidden_layers)
    agreed = positions = 0
    divergence = 0.0
    for rows in tqdm(_pair(source, packed), total=len(packed), desc="head", unit=" records", disable=None):
        for both in zip(*(each[:, column].split(ROWS_AT_A_TIME) for each in rows), strict=True):
            was, now = (target.logits(states).log_softmax(dim=-1) for states in both)
            agreed += int((was.argmax(dim=-1) == now.argmax(dim=-1)).sum())
            divergence += float(torch.nn.functional.kl_div(now, was, reduction="sum", log_target=True))
            positions += len(was)
    return {"same first choice": agreed / positions, "kl": divergence / positions}


def _pair(source: Store, packed: Store) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for number, now in zip(source.complete_numbers(), packed, strict=True):
        yield source[number].hidden_states.double(), now.hidden_states.double()


def show(report: dict[str, Any]) -> None:
    plain, packed = report["bytes a token"], report["bytes a token in float8"]
    print(
        f"{report['tokens']} tokens, {plain} bytes each in {report['dtype']}, {packed} in float8: {packed / plain:.2%}"
    )
    print(f"{'layer':>8}{'rms':>10}{'largest':>10}")
    for layer, rms, largest in zip(report["layer_ids"], report["rms"], report["largest"], strict=True):
        print(f"{layer:>8}{rms:10.3%}{largest:10.3%}")
    if "head" in report:
        same, divergence = report["head"]["same first choice"], report["head"]["kl"]
        print(f"the target's head: the same first choice at {same:.2%} of the positions, KL {divergence:.5f}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", type=Path, metavar="STORE")
    parser.add_argument("-o", "--output", required=True, type=Path, metavar="FOLDER", help="a new folder")
    parser.add_argument(
        "--model", type=Path, metavar="MODEL", help="the target, a local folder (default: its head is not looked at)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there too")
    args = parser.parse_args()
    try:
        with Store.open(args.store) as source:
            target = None if args.model is None else load_target_of(source, args.model)
            pack_store(source, args.output)
            with Store.open(args.output) as packed:
                report = compare(source, packed)
                if target is not None:
                    report["head"] = compare_heads(source, packed, target)
        if args.json is not None:
            args.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    except (OverlayError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    show(report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
