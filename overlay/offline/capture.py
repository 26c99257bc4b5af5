"""A dataset through vLLM's offline engine with capture on: every item once, what is in the store already not again.

By one engine, or by several replicas that each take a share and write a store of their own into the folder.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from vllm_overlay import activation
from vllm_overlay.dataset import Dataset, DatasetItem
from vllm_overlay.errors import OverlayError
from vllm_overlay.fingerprint import fingerprint_model
from vllm_overlay.layer_ids import resolve_layer_ids
from vllm_overlay.model_shape import ModelShape, count_row_bytes, read_model_shape
from vllm_overlay.offline.replica import ALONE, Plan, Replica, forget_launcher, share_out
from vllm_overlay.settings import read_dtype
from vllm_overlay.store import REPLICA_PREFIX, Record, Store, find_stores, is_store

if TYPE_CHECKING:
    from vllm import LLM

# Prompts are handed to the engine in groups, so that the progress bar moves and the prompts of a huge dataset are not
# all in the engine at once. A group is what the engine did in so many seconds before: a GPU's batches stay full to the
# end of a long group, and a CPU shows that it is alive.
FIRST_GROUP_TOKENS = 4_096
GROUP_SECONDS = 10.0

# The user's own choice for serving: a command that captures a dataset captures all of it.
NOT_FOR_COMMANDS = ("VLLM_OVERLAY_SAMPLE", "VLLM_OVERLAY_TOKENS")


@dataclass(frozen=True)
class CaptureSummary:
    """What a run of the command did."""

    captured: int
    already_there: int
    num_tokens: int
    num_bytes: int
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds if self.seconds else 0.0


def capture_dataset(
    dataset: Path, *, model: str, store: Path, layers: str, engine_options: Sequence[str], replica: Replica = ALONE
) -> CaptureSummary:
    """Capture what the store does not hold yet of this replica's share; each item becomes a record tagged with its key.

    Errors: OverlayError before the model loads when the disk is too small, the folder cannot be written, the layers do
    not exist or `replica` cannot be one; afterwards when an item is longer than the engine takes or a record is missing
    at the end.
    """
    _refuse_ranks_of_one_engine(replica, engine_options)
    items = list(Dataset.open(dataset))
    shape = read_model_shape(model, engine_options)
    layer_ids = resolve_layer_ids(layers, shape.num_hidden_layers)
    plan = share_out(items, replica.count)
    folder = choose_folder(store, replica, plan)
    missing = {item.key for item in find_missing(items, find_readable(store, folder, plan), model, layer_ids)}
    share = plan.take(items, replica.index)
    wanted = [item for item in share if item.key in missing]
    if replica.count > 1:
        print(
            f"replica {replica} ({replica.source}): {len(share)} of {len(items)} items, {len(wanted)} of them missing; "
            f"writes {folder}",
            flush=True,
        )
    if not wanted:
        return CaptureSummary(0, len(share), 0, 0, 0.0)
    unbegun = _find_unbegun(store, replica, plan)
    theirs = [item for item, owner in zip(items, plan.owners, strict=True) if owner in unbegun and item.key in missing]
    check_disk(store, wanted + theirs, shape, len(layer_ids))
    switch_on(folder, layers, read_dtype())
    if not _is_rank_of_an_engine(engine_options):
        forget_launcher(os.environ)
    bar_name = f"capture {replica}" if replica.count > 1 else "capture"
    return _run(wanted, len(share) - len(wanted), model, folder, engine_options, bar_name)


def choose_folder(store: Path, replica: Replica, plan: Plan) -> Path:
    """Where a replica writes: a store of its own within the folder, always the same one for the same share.

    One that is alone writes into the folder itself, unless replicas have written there.
    """
    if replica.count == 1 and not any(path != store for path in find_stores(store)):
        return store
    return store / f"{REPLICA_PREFIX}{replica.index}-of-{replica.count}-{plan.digest}"


def find_readable(store: Path, own: Path, plan: Plan) -> list[Path]:
    """The stores that may hold items of this replica's share: its own, and those of earlier runs.

    Not those of the other replicas of this run: they hold items of their own shares, and may be written by another
    machine at this moment, so that nothing of them is opened.
    """
    found = [store, *sorted(store.glob(f"{REPLICA_PREFIX}*"))]
    return [path for path in found if (path == own or not path.name.endswith(f"-{plan.digest}")) and is_store(path)]


def find_spans(mask: NDArray[np.bool_]) -> list[list[int]]:
    """A mask as [start, end) pairs of its true runs."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], mask, [False])).astype(np.int8)))
    return [[int(start), int(end)] for start, end in edges.reshape(-1, 2)]


def find_missing(
    items: Sequence[DatasetItem], stores: Sequence[Path], model: str, layer_ids: tuple[int, ...]
) -> list[DatasetItem]:
    """The items that none of the stores holds. Errors: OverlayError when one holds other rows than wanted."""
    _check_stores(stores, model, layer_ids)
    done = find_done(stores, items)
    return [item for item in items if item.key not in done]


def find_done(stores: Sequence[Path], items: Sequence[DatasetItem]) -> set[str]:
    """Keys of the items of which one of the stores has a complete record with the very tokens of the item.

    Not every record of that key: an engine that was interrupted leaves an aborted request's first rows, and a dataset
    prepared again may use the same keys for other text.
    """
    tokens = {item.key: item.token_ids for item in items}
    done: set[str] = set()
    for store in stores:
        with Store(store) as opened:
            done |= {record.tag for record in opened if record.tag and _is_whole(record, tokens.get(record.tag))}
    return done


def _is_whole(record: Record, token_ids: NDArray[np.int64] | None) -> bool:
    return token_ids is not None and record.complete and np.array_equal(record.token_ids.numpy(), token_ids)


def _check_stores(stores: Sequence[Path], model: str, layer_ids: tuple[int, ...]) -> None:
    """Errors: OverlayError when one of the stores holds other layers, another model's states, or another dtype."""
    for store in stores:
        with Store(store) as opened:
            if opened.layer_ids != layer_ids:
                raise OverlayError(
                    f"{store} holds the layers {opened.layer_ids}, asked for are {layer_ids}: name another store"
                )
            if opened.meta.model_fingerprint != fingerprint_model(model, {}):
                raise OverlayError(f"{store} holds states of other weights ({opened.meta.model}): name another store")
            if opened.meta.is_packed != (read_dtype() == "fp8"):
                raise OverlayError(
                    f"{store} holds rows in {opened.meta.dtype}, and VLLM_OVERLAY_DTYPE is {read_dtype()}: name "
                    f"another store, or set it to {'fp8' if opened.meta.is_packed else 'auto'}"
                )


def _refuse_ranks_of_one_engine(replica: Replica, engine_options: Sequence[str]) -> None:
    if replica.count > 1 and _is_rank_of_an_engine(engine_options):
        raise OverlayError(
            f"{replica.source}: with external_launcher these processes are ranks of one engine and not replicas; "
            "leave the option away, and every process starts an engine of its own"
        )


def _is_rank_of_an_engine(engine_options: Sequence[str]) -> bool:
    """Whether vLLM takes its rank from the launcher's variables, so that they must stay."""
    return "external_launcher" in " ".join(engine_options)


def _find_unbegun(store: Path, replica: Replica, plan: Plan) -> set[int]:
    """The other replicas that have no folder yet: what is missing of their shares will take room on the same disk."""
    others = [Replica(index, replica.count, "") for index in range(replica.count) if index != replica.index]
    return {other.index for other in others if not choose_folder(store, other, plan).exists()}


def check_disk(store: Path, items: Sequence[DatasetItem], shape: ModelShape, num_layers: int) -> None:
    folder = next(parent for parent in (store, *store.absolute().parents) if parent.exists())
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise OverlayError(f"cannot write {store}: {folder} is not a folder that can be written; choose another")
    num_tokens = sum(len(item.token_ids) for item in items)
    row_bytes = count_row_bytes(shape.hidden_size, shape.itemsize, read_dtype())
    needed = num_tokens * num_layers * row_bytes
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise OverlayError(
            f"{num_tokens} tokens x {num_layers} layers x {row_bytes} bytes need "
            f"{needed / 1e9:.1f} GB in {folder}, which has {free / 1e9:.1f} GB free: free some, or capture fewer layers"
        )


def switch_on(store: Path, layers: str, dtype: str) -> None:
    os.environ["VLLM_OVERLAY"] = "1"
    os.environ["VLLM_OVERLAY_CAPTURE"] = str(store)
    os.environ["VLLM_OVERLAY_LAYERS"] = layers
    os.environ["VLLM_OVERLAY_DTYPE"] = dtype
    for name in NOT_FOR_COMMANDS:
        os.environ.pop(name, None)
    activation.activate()


def _run(
    items: Sequence[DatasetItem],
    already_there: int,
    model: str,
    store: Path,
    engine_options: Sequence[str],
    bar_name: str,
) -> CaptureSummary:
    from vllm_overlay.offline.engine import build_engine, shut_down
    from vllm_overlay.progress import make_bar

    llm = build_engine(model, engine_options)
    try:
        check_lengths(llm, items)
        num_tokens = sum(len(item.token_ids) for item in items)
        started = time.perf_counter()
        with make_bar(total=num_tokens, unit="tok", unit_scale=True, desc=bar_name) as bar:
            limit, rest = FIRST_GROUP_TOKENS, list(items)
            while rest:
                group, rest = take_group(rest, limit)
                group_started = time.perf_counter()
                capture_group(llm, group)
                group_tokens = sum(len(item.token_ids) for item in group)
                limit = int(group_tokens * GROUP_SECONDS / (time.perf_counter() - group_started))
                num_bytes = count_bytes(llm.collective_rpc("overlay_statistics"))
                bar.set_postfix_str(f"{num_bytes / 1e6:.0f} MB", refresh=False)
                bar.update(group_tokens)
        num_bytes = count_bytes(llm.collective_rpc("overlay_flush"))
        seconds = time.perf_counter() - started
    finally:
        shut_down(llm)
    check_complete([store], items)
    return CaptureSummary(len(items), already_there, num_tokens, num_bytes, seconds)


def count_bytes(of_every_rank: Sequence[dict[str, int]]) -> int:
    return sum(statistics["bytes"] for statistics in of_every_rank)


def check_lengths(llm: LLM, items: Sequence[DatasetItem]) -> None:
    limit = llm.llm_engine.model_config.max_model_len
    long = [item for item in items if len(item.token_ids) + 1 > limit]
    if long:
        raise OverlayError(
            f"{len(long)} of {len(items)} items are longer than the engine takes ({limit} tokens, one of them "
            f"generated), the first {long[0].key!r} with {len(long[0].token_ids)}: "
            f"prepare with --max-length {limit - 1}, or raise "
            "--max-model-len after --"
        )


def capture_group(llm: LLM, group: Sequence[DatasetItem]) -> None:
    from vllm import SamplingParams

    # One token is generated and none of its rows kept: the record's rows are the item's own tokens.
    params = [
        SamplingParams(max_tokens=1, temperature=0.0, detokenize=False, extra_args={"overlay": _options(item)})
        for item in group
    ]
    prompts: list[Any] = [{"prompt_token_ids": item.token_ids.tolist()} for item in group]
    llm.generate(prompts, params, use_tqdm=False)


def _options(item: DatasetItem) -> dict[str, Any]:
    return {"tag": item.key, "loss_spans": find_spans(item.loss_mask)}


def take_group(items: list[DatasetItem], limit: int) -> tuple[list[DatasetItem], list[DatasetItem]]:
    """The first items up to about `limit` tokens, at least one of them, and the rest."""
    num_tokens = 0
    for index, item in enumerate(items):
        num_tokens += len(item.token_ids)
        if num_tokens >= limit:
            return items[: index + 1], items[index + 1 :]
    return items, []


def check_complete(stores: Sequence[Path], items: Sequence[DatasetItem]) -> None:
    """Errors: OverlayError when an item has no complete record in any of the stores."""
    missing = sorted({item.key for item in items} - find_done(stores, items))
    if missing:
        raise OverlayError(
            f"{len(missing)} of {len(items)} items have no complete record in {', '.join(map(str, stores))}, the first "
            f"{missing[0]!r}: run the command again to take them up"
        )
