"""Other people's layouts: one safetensors file a record, both ways.

    vllm          DIR/{request id}.safetensors, and an empty .lock beside each, which vLLM's own reader opens
                  (vllm/distributed/kv_transfer/kv_connector/v1/example_hidden_states_connector.py, 0.32.0)
    speculators   DIR/hidden_states/hs_{i}.safetensors, and in DIR the Arrow data set that its trainer takes the
                  loss mask from (speculators/train/data.py, ArrowDataset, 0.9.0)

A file has `hidden_states` `[T, layers, hidden]` and `token_ids` int64 `[T]`; with an fp8 dtype also
`hidden_states_scales` float32 `[T, 1, 1]`. speculators takes the last of the layers for the target's last state, before
the final norm, and the others for the draft's features. Files of ours have a `loss_mask` bool `[T]` too if the record
has one, which both readers pass over, and say in their metadata which layers they hold and what the ids mean.
"""

from __future__ import annotations

import fcntl
import importlib
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from vllm_overlay.store.errors import StoreError, naming_path
from vllm_overlay.store.meta import StoreMeta
from vllm_overlay.store.new_folder import new_folder, refuse_nested
from vllm_overlay.store.reader import Record, Store
from vllm_overlay.store.writer import PendingRecord, StoreWriter

LAYOUTS = ("vllm", "speculators")
SPECULATORS_STATES = "hidden_states"  # folder
FP8_SCALES = "hidden_states_scales"
RECORDS_PER_COMMIT = 64
LONGEST_NAME = 180  # bytes; a file system has 255

# Whose layer ids: what they mean, and how much to add for ours.
RESIDUAL, AFTER_LAYER = "residual", "after-layer"
ID_MEANINGS = {
    RESIDUAL: "0 is the embedding output, k the residual stream after k decoder layers",
    AFTER_LAYER: "k is the output of decoder layer k, counted from 0",
}
SHIFTS = {RESIDUAL: 0, AFTER_LAYER: 1}

Metadata = dict[str, str]

# Gives the same items again and shows how far it is.
Progress = Callable[[Iterable[Any], int], Iterable[Any]]


# Of a record, in the metadata of files of ours.
FACT_TYPES: dict[str, type | tuple[type, ...]] = {
    "request_id": str,
    "num_prompt_tokens": int,
    "finish_reason": str,
    "tag": (str, type(None)),
    "first_position": int,
}


@dataclass(frozen=True)
class Written:
    """Records that were written as files; those left out because they are incomplete, or windows of their requests."""

    records: int
    incomplete: int
    windows: int


@dataclass(frozen=True)
class Read:
    """Files that became records; those of them that say nothing of a prompt, so that the loss mask has every token."""

    records: int
    without_prompt: int


@dataclass(frozen=True)
class RecordFile:
    """One file, read. token_ids: int64 [T]. hidden_states: [T, layers, hidden]. loss_mask: [T], or None.

    layer_ids: as a store has them, None if the file does not say. Only files of ours have the last two: store_meta is
    that of the store which the file was made from, facts are the record's own (FACT_TYPES).
    """

    path: Path
    token_ids: torch.Tensor
    hidden_states: torch.Tensor
    loss_mask: torch.Tensor | None
    layer_ids: tuple[int, ...] | None
    store_meta: StoreMeta | None
    facts: dict[str, Any]


def to_ours(layer_ids: Sequence[int], meaning: str) -> tuple[int, ...]:
    """Layer ids of that meaning as a store has them: after-layer [1, 2, 3] is (2, 3, 4)."""
    return tuple(layer + SHIFTS[meaning] for layer in layer_ids)


def from_ours(layer_ids: Sequence[int], meaning: str) -> tuple[int, ...]:
    """A store's layer ids in that meaning. Raises StoreError if one has none: the embedding output is no layer's."""
    shifted = tuple(layer - SHIFTS[meaning] for layer in layer_ids)
    if min(shifted) < 0:
        raise StoreError(f"layer id 0, the embedding output, has no number where {ID_MEANINGS[meaning]}")
    return shifted


def write_record_files(store: Store, folder: Path, layout: str, meaning: str, progress: Progress) -> Written:
    """Write the complete records of a store as files, into a new folder; for speculators not those that are windows.

    Raises StoreError if the folder is in use or cannot be written, if there is no such record or one cannot be read, or
    if speculators' layout is asked for and the store has no last state.
    """
    refuse_nested(folder, [store.path])
    columns = _order_columns(store, layout)
    layer_ids = from_ours([store.layer_ids[column] for column in columns], meaning)
    total, numbers = len(store), store.complete_numbers()
    if not numbers:
        raise StoreError(f"none of the {total} records of {store.path} is complete: there is nothing to convert")
    records = (store[number] for number in progress(numbers, len(numbers)))
    described = ((record, _describe(store, record, layer_ids, meaning)) for record in records)
    fill = _fill_for_speculators if layout == "speculators" else _fill_for_vllm
    with new_folder(folder) as unfinished:
        written = fill(unfinished, described, columns)
        if not written:
            raise StoreError(
                f"all complete records of {store.path} begin after position 0 of their requests, and speculators would "
                f"train them from position 0: convert to vllm"
            )
    return Written(written, total - len(numbers), len(numbers) - written)


def _fill_for_vllm(folder: Path, records: Iterable[tuple[Record, Metadata]], columns: Sequence[int]) -> int:
    """Returns the number of files."""
    used: Counter[str] = Counter()
    for record, metadata in records:
        path = folder / f"{_name_file(record.request_id, used)}.safetensors"
        _write_file(path, record, columns, metadata)
        with naming_path("create", path):
            path.with_name(path.name + ".lock").touch()
    return used.total()


def _fill_for_speculators(folder: Path, records: Iterable[tuple[Record, Metadata]], columns: Sequence[int]) -> int:
    """Returns the number of files, one for each record that begins at position 0: their reader counts from there."""
    datasets = _import_datasets(folder)
    states = folder / SPECULATORS_STATES
    with naming_path("create", states):
        states.mkdir()
    rows: dict[str, list[Any]] = {"input_ids": [], "loss_mask": [], "seq_len": []}
    whole = (pair for pair in records if pair[0].first_position == 0)
    for place, (record, metadata) in enumerate(whole):
        _write_file(states / f"hs_{place}.safetensors", record, columns, metadata)
        rows["input_ids"].append(record.token_ids.numpy())
        rows["loss_mask"].append(_find_loss_mask(record).numpy().astype(np.int64))
        rows["seq_len"].append(len(record.token_ids))
    if not rows["seq_len"]:
        return 0
    datasets.disable_progress_bars()
    dataset = datasets.Dataset.from_dict(rows)
    dataset.set_format("torch")
    with naming_path("write", folder):
        dataset.save_to_disk(folder)
    return len(rows["seq_len"])


def _import_datasets(folder: Path) -> Any:
    """The library of speculators' data sets. Raises StoreError if it is not there, or is one that does not import."""
    try:
        return importlib.import_module("datasets")
    except ModuleNotFoundError as error:
        raise StoreError(f"{folder} is to hold, or holds, an Arrow data set: pip install datasets") from error
    except Exception as error:
        # datasets 2.14, which vLLM 0.11.0 comes with, fails inside a pyarrow that is newer than it.
        raise StoreError(
            f"the Arrow data set of {folder} needs datasets, and the one installed does not import "
            f"({type(error).__name__}: {error}): pip install -U datasets"
        ) from error


def _order_columns(store: Store, layout: str) -> list[int]:
    """The store's columns in the order of the layout's."""
    columns = list(range(len(store.layer_ids)))
    if layout != "speculators":
        return columns
    last = store.meta.num_hidden_layers
    if last not in store.layer_ids:
        held = ", ".join(map(str, store.layer_ids))
        raise StoreError(
            f"speculators trains on the last state, id {last} of this target, and {store.path} holds {held}: "
            f"capture it too, or convert to vllm"
        )
    final = store.layer_ids.index(last)
    return [*(column for column in columns if column != final), final]


def _name_file(request_id: str, used: Counter[str]) -> str:
    """A file name for the request; the second record of the same one gets a number."""
    name = re.sub(r"[^A-Za-z0-9._-]", "_", request_id).lstrip(".")[:LONGEST_NAME] or "_"
    used[name] += 1
    return name if used[name] == 1 else f"{name}~{used[name]}"


def _describe(store: Store, record: Record, layer_ids: Sequence[int], meaning: str) -> Metadata:
    facts = {
        "store": json.loads(store.meta.to_json()),
        "request_id": record.request_id,
        "num_prompt_tokens": record.num_prompt_tokens,
        "finish_reason": record.finish_reason,
        "tag": record.tag,
        "first_position": record.first_position,
    }
    return {
        "layer_ids": json.dumps(list(layer_ids)),
        "layer_ids_mean": meaning,
        "layer_ids_mean_that": ID_MEANINGS[meaning],
        "vllm_overlay": json.dumps(facts),
    }


def _write_file(path: Path, record: Record, columns: Sequence[int], metadata: Metadata) -> None:
    states = record.hidden_states
    if list(columns) != list(range(states.shape[1])):
        states = states[:, list(columns)]
    tensors = {"hidden_states": states.contiguous(), "token_ids": record.token_ids}
    if record.loss_mask is not None:
        tensors["loss_mask"] = record.loss_mask
    try:
        with naming_path("write", path):
            save_file(tensors, path, metadata=metadata)
    except SafetensorError as error:  # what safetensors makes of an error of the disk
        raise StoreError(f"cannot write {path}: {error}") from error


def _find_loss_mask(record: Record) -> torch.Tensor:
    """bool `[T]`; where capture knew of none, every generated token counts."""
    if record.loss_mask is not None:
        return record.loss_mask
    return torch.arange(len(record.token_ids)) >= record.num_prompt_tokens


def find_record_files(folder: Path, layout: str) -> list[Path]:
    """The files of the layout in a folder: vLLM's by name, speculators' by number. Raises StoreError if it has none."""
    if layout == "speculators":
        states = folder / SPECULATORS_STATES
        found = list((states if states.is_dir() else folder).glob("hs_*.safetensors"))
        numbered = {int(path.stem[3:]): path for path in found if path.stem[3:].isdigit()}
        files = [numbered[number] for number in sorted(numbered)]
    else:
        files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise StoreError(f"{folder} has no file of {layout}'s layout")
    return files


def read_record_file(path: Path) -> RecordFile:
    """Raises StoreError if it is no such file, is damaged, says what cannot be, or is still being written."""
    _refuse_unfinished(path)
    try:
        with naming_path("read", path), safe_open(path, framework="pt") as content:
            tensors = {name: content.get_tensor(name) for name in content.keys()}  # noqa: SIM118 - no dictionary
            metadata = content.metadata() or {}
    except SafetensorError as error:
        raise StoreError(f"{path} is no whole safetensors file: {error}") from error
    missing = sorted({"hidden_states", "token_ids"} - set(tensors))
    if missing:
        raise StoreError(f"{path} has no tensor {missing[0]!r}: it is none of vLLM's or speculators' files")
    token_ids, states = tensors["token_ids"].long(), tensors["hidden_states"]
    if states.dim() != 3 or token_ids.shape != states.shape[:1]:
        raise StoreError(
            f"{path}: hidden states {list(states.shape)} and token ids {list(token_ids.shape)} are not "
            f"[T, layers, hidden] and [T]"
        )
    if FP8_SCALES in tensors:
        states = (states.float() * tensors[FP8_SCALES]).to(torch.bfloat16)
    facts = _read_json(path, metadata, "vllm_overlay", dict)
    return RecordFile(
        path,
        token_ids,
        states,
        tensors.get("loss_mask"),
        _read_layer_ids(path, metadata),
        _read_store_meta(path, facts),
        _read_facts(path, facts),
    )


def _read_json(path: Path, metadata: Metadata, name: str, kind: type) -> Any:
    """What the metadata has under this name, an empty one if nothing. Raises StoreError if it is of another kind."""
    text = metadata.get(name)
    if text is None:
        return kind()
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, kind):
        raise StoreError(f"{path}: {name} of its metadata is {text!r}, where a {kind.__name__} in JSON is expected")
    return value


def _read_layer_ids(path: Path, metadata: Metadata) -> tuple[int, ...] | None:
    layer_ids = _read_json(path, metadata, "layer_ids", list)
    meaning = metadata.get("layer_ids_mean", RESIDUAL)
    if not all(isinstance(layer, int) for layer in layer_ids):
        raise StoreError(f"{path}: layer_ids of its metadata is {layer_ids}, where numbers are expected")
    if meaning not in SHIFTS:
        raise StoreError(f"{path}: layer_ids_mean of its metadata is {meaning!r}, which is none of {', '.join(SHIFTS)}")
    return to_ours(layer_ids, meaning) or None


def _read_store_meta(path: Path, facts: dict[str, Any]) -> StoreMeta | None:
    if "store" not in facts:
        return None
    try:
        return StoreMeta.from_json(json.dumps(facts["store"]))
    except (KeyError, TypeError, StoreError) as error:
        raise StoreError(f"{path}: what its metadata says of its store is not whole ({error})") from error


def _read_facts(path: Path, facts: dict[str, Any]) -> dict[str, Any]:
    found = {name: facts[name] for name in FACT_TYPES if name in facts}
    for name, value in found.items():
        if not isinstance(value, FACT_TYPES[name]):
            raise StoreError(f"{path}: {name} of its metadata is {value!r}, of the wrong type")
    return found


def _refuse_unfinished(path: Path) -> None:
    """vLLM's writer holds a lock on a file beside it until it has ended, and leaves that file."""
    lock = path.with_name(path.name + ".lock")
    if not lock.exists():
        return
    with naming_path("open", lock):
        fd = os.open(lock, os.O_RDONLY)
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StoreError(f"{path} is still being written: wait for vLLM to end") from None
        finally:
            os.close(fd)


def find_layer_ids(file: RecordFile, said: Sequence[int] | None, meaning: str) -> tuple[int, ...]:
    """The layers of a file as a store has them: from its metadata, or else as the user said, in that meaning.

    Raises StoreError if neither says, both say and differ, or they are not as many as the file has.
    """
    ours = None if said is None else to_ours(said, meaning)
    if file.layer_ids is not None:
        if ours not in (None, file.layer_ids):
            raise StoreError(f"{file.path} says that it holds layers {list(file.layer_ids)}, not {list(ours or ())}")
        ours = file.layer_ids
    if ours is None:
        raise StoreError(f"{file.path} does not say which layers it holds: name them with --layers (and --ids)")
    if len(ours) != file.hidden_states.shape[1]:
        raise StoreError(f"{file.path} has {file.hidden_states.shape[1]} layers, not the {len(ours)} of {list(ours)}")
    return ours


def write_store(
    files: Sequence[Path], folder: Path, meta: StoreMeta, loss_masks: Sequence[torch.Tensor] | None, progress: Progress
) -> Read:
    """Make a store of the files, in a new folder. Layers are in the order of `meta`, which must be the files'.

    loss_masks: bool [T] of each file, or None where the files have their own. A file of others without one does not say
    where its prompt ends: all of its tokens count. Raises StoreError if a file cannot be read, has other rows or those
    of another target, or the store cannot be written.
    """
    without_prompt = 0
    with new_folder(folder) as unfinished, StoreWriter.open(unfinished, meta) as writer:
        pending: list[PendingRecord] = []
        for place, path in enumerate(progress(files, len(files))):
            file = read_record_file(path)
            _refuse_other_rows(file, meta)
            mask = loss_masks[place] if file.loss_mask is None and loss_masks is not None else file.loss_mask
            if mask is None and "num_prompt_tokens" not in file.facts:
                mask = torch.ones(len(file.token_ids), dtype=torch.bool)
                without_prompt += 1
            pending.append(_append(writer, file, mask))
            if len(pending) == RECORDS_PER_COMMIT:
                writer.commit(pending)
                pending = []
        writer.commit(pending)
    return Read(len(files), without_prompt)


def _refuse_other_rows(file: RecordFile, meta: StoreMeta) -> None:
    shape, dtype = tuple(file.hidden_states.shape[1:]), file.hidden_states.dtype
    if shape != meta.row_shape or dtype != meta.torch_dtype:
        raise StoreError(f"{file.path} has rows {list(shape)} of {dtype}, the first file {list(meta.row_shape)}")
    if file.layer_ids is not None:
        find_layer_ids(file, meta.layer_ids, RESIDUAL)
    theirs = file.store_meta
    if theirs is not None and theirs.model_fingerprint != meta.model_fingerprint:
        raise StoreError(
            f"{file.path} holds states of other weights ({theirs.model}) than the store's ({meta.model}): convert each "
            f"target's files by themselves"
        )


def _append(writer: StoreWriter, file: RecordFile, mask: torch.Tensor | None) -> PendingRecord:
    tokens, facts = len(file.token_ids), file.facts
    first = writer.append(file.hidden_states.contiguous())
    if mask is not None and len(mask) != tokens:
        raise StoreError(f"{file.path} has {tokens} tokens, its loss mask {len(mask)}")
    return PendingRecord(
        request_id=facts.get("request_id", file.path.stem),
        token_ids=file.token_ids.numpy(),
        rows=np.arange(first, first + tokens, dtype=np.int64),
        # Their files do not say where the prompt ends.
        num_prompt_tokens=facts.get("num_prompt_tokens", tokens),
        complete=True,
        finish_reason=facts.get("finish_reason", "unknown"),
        tag=facts.get("tag"),
        loss_mask=None if mask is None else mask.bool().numpy(),
        first_position=facts.get("first_position", 0),
    )


def read_loss_masks(folder: Path, files: Sequence[Path]) -> list[torch.Tensor] | None:
    """Those of speculators' data set in the folder, bool [T] for each of the files; None if there is no data set.

    Raises StoreError if the library that reads it is not there, or the data set has no row for a file.
    """
    if not (folder / "dataset_info.json").is_file():
        return None
    rows = _import_datasets(folder).load_from_disk(str(folder)).with_format("torch")
    numbers = [int(path.stem[3:]) for path in files]
    if numbers[-1] >= len(rows):
        raise StoreError(f"{folder} has a data set of {len(rows)} rows and none for {files[-1].name}")
    return [rows[number]["loss_mask"].bool() for number in numbers]
