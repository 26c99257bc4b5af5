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


@dataclass(frozen=True)
class Converted:
    """Records that were written, and incomplete ones that were left out."""

    records: int
    left_out: int


@dataclass(frozen=True)
class RecordFile:
    """One file, read. token_ids: int64 [T]. hidden_states: [T, layers, hidden]. metadata: the file's, or empty."""

    path: Path
    token_ids: torch.Tensor
    hidden_states: torch.Tensor
    loss_mask: torch.Tensor | None
    metadata: Metadata

    @property
    def facts(self) -> dict[str, Any]:
        """What only files of ours say: the store's meta and the record's own facts."""
        facts: dict[str, Any] = json.loads(self.metadata.get("vllm_overlay", "{}"))
        return facts


def to_ours(layer_ids: Sequence[int], meaning: str) -> tuple[int, ...]:
    """Layer ids of that meaning as a store has them: after-layer [1, 2, 3] is (2, 3, 4)."""
    return tuple(layer + SHIFTS[meaning] for layer in layer_ids)


def from_ours(layer_ids: Sequence[int], meaning: str) -> tuple[int, ...]:
    """A store's layer ids in that meaning. Raises StoreError if one has none: the embedding output is no layer's."""
    shifted = tuple(layer - SHIFTS[meaning] for layer in layer_ids)
    if min(shifted) < 0:
        raise StoreError(f"layer id 0, the embedding output, has no number where {ID_MEANINGS[meaning]}")
    return shifted


def write_record_files(store: Store, folder: Path, layout: str, meaning: str, progress: Progress) -> Converted:
    """Write the complete records of a store as files, into a new folder.

    Raises StoreError if the folder is in use or cannot be written, if a record cannot be read, or if speculators'
    layout is asked for and the store has no last state.
    """
    refuse_nested(folder, [store.path])
    columns = _order_columns(store, layout)
    layer_ids = from_ours([store.layer_ids[column] for column in columns], meaning)
    numbers = store.complete_numbers()
    records = (store[number] for number in progress(numbers, len(numbers)))
    described = ((record, _describe(store, record, layer_ids, meaning)) for record in records)
    fill = _fill_for_speculators if layout == "speculators" else _fill_for_vllm
    with new_folder(folder) as unfinished:
        fill(unfinished, described, columns)
    return Converted(len(numbers), len(store) - len(numbers))


def _fill_for_vllm(folder: Path, records: Iterable[tuple[Record, Metadata]], columns: Sequence[int]) -> None:
    used: Counter[str] = Counter()
    for record, metadata in records:
        path = folder / f"{_name_file(record.request_id, used)}.safetensors"
        _write_file(path, record, columns, metadata)
        with naming_path("create", path):
            path.with_name(path.name + ".lock").touch()


def _fill_for_speculators(folder: Path, records: Iterable[tuple[Record, Metadata]], columns: Sequence[int]) -> None:
    datasets = _import_datasets(folder)
    states = folder / SPECULATORS_STATES
    with naming_path("create", states):
        states.mkdir()
    rows: dict[str, list[Any]] = {"input_ids": [], "loss_mask": [], "seq_len": []}
    for place, (record, metadata) in enumerate(records):
        _write_file(states / f"hs_{place}.safetensors", record, columns, metadata)
        rows["input_ids"].append(record.token_ids.numpy())
        rows["loss_mask"].append(_find_loss_mask(record).numpy().astype(np.int64))
        rows["seq_len"].append(len(record.token_ids))
    datasets.disable_progress_bars()
    dataset = datasets.Dataset.from_dict(rows)
    dataset.set_format("torch")
    with naming_path("write", folder):
        dataset.save_to_disk(folder)


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
    """Raises StoreError if it is no such file, is damaged, or is still being written."""
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
    return RecordFile(path, token_ids, states, tensors.get("loss_mask"), metadata)


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
    if "layer_ids" in file.metadata:
        found = to_ours(json.loads(file.metadata["layer_ids"]), file.metadata.get("layer_ids_mean", RESIDUAL))
        if ours not in (None, found):
            raise StoreError(f"{file.path} says that it holds layers {list(found)}, not {list(ours or ())}")
        ours = found
    if ours is None:
        raise StoreError(f"{file.path} does not say which layers it holds: name them with --layers (and --ids)")
    if len(ours) != file.hidden_states.shape[1]:
        raise StoreError(f"{file.path} has {file.hidden_states.shape[1]} layers, not the {len(ours)} of {list(ours)}")
    return ours


def write_store(
    files: Sequence[Path], folder: Path, meta: StoreMeta, loss_masks: Sequence[torch.Tensor] | None, progress: Progress
) -> Converted:
    """Make a store of the files, in a new folder. Layers are in the order of `meta`, which must be the files'.

    loss_masks: bool [T] of each file, or None where the files have their own. Raises StoreError if a file cannot be
    read or has other rows, or the store cannot be written.
    """
    with new_folder(folder) as unfinished, StoreWriter.open(unfinished, meta) as writer:
        pending: list[PendingRecord] = []
        for place, path in enumerate(progress(files, len(files))):
            file = read_record_file(path)
            _refuse_other_rows(file, meta)
            pending.append(_append(writer, file, None if loss_masks is None else loss_masks[place]))
            if len(pending) == RECORDS_PER_COMMIT:
                writer.commit(pending)
                pending = []
        writer.commit(pending)
    return Converted(len(files), 0)


def _refuse_other_rows(file: RecordFile, meta: StoreMeta) -> None:
    shape, dtype = tuple(file.hidden_states.shape[1:]), file.hidden_states.dtype
    if shape != meta.row_shape or dtype != meta.torch_dtype:
        raise StoreError(f"{file.path} has rows {list(shape)} of {dtype}, the first file {list(meta.row_shape)}")
    said = file.metadata.get("layer_ids")
    if said is not None:
        find_layer_ids(file, meta.layer_ids, RESIDUAL)


def _append(writer: StoreWriter, file: RecordFile, loss_mask: torch.Tensor | None) -> PendingRecord:
    tokens, facts = len(file.token_ids), file.facts
    first = writer.append(file.hidden_states.contiguous())
    mask = file.loss_mask if file.loss_mask is not None else loss_mask
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
