"""The dataset folder: `dataset.safetensors` and `dataset.json`.

    token_ids  int32 [tokens of all conversations]    one conversation after the other
    offsets    int64 [conversations + 1]              conversation i is tokens offsets[i] to offsets[i + 1]
    loss_mask  uint8 [tokens of all conversations]    1 where the assistant wrote the token

`dataset.json` has the conversations' keys, in the same order, and what the dataset was made of.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_overlay.errors import OverlayError

FORMAT = 1
TENSORS_FILE = "dataset.safetensors"
FACTS_FILE = "dataset.json"


@dataclass(frozen=True)
class DatasetItem:
    """One conversation: `token_ids` [T] int64, `loss_mask` [T] bool (true where the assistant wrote the token)."""

    key: str
    token_ids: npt.NDArray[np.int64]
    loss_mask: npt.NDArray[np.bool_]


class Dataset:
    """A dataset folder, read whole into memory (5 bytes a token)."""

    def __init__(self, keys: Sequence[str], tensors: Mapping[str, npt.NDArray[Any]], meta: dict[str, Any]) -> None:
        self.keys = tuple(keys)
        self.meta = meta
        self._token_ids = tensors["token_ids"]
        self._offsets = tensors["offsets"]
        self._loss_mask = tensors["loss_mask"]

    @classmethod
    def open(cls, path: str | Path) -> Dataset:
        """Raises OverlayError when `path` is not a complete dataset folder."""
        from safetensors import SafetensorError
        from safetensors.numpy import load_file

        folder = Path(path)
        facts = _read_facts(folder)
        try:
            tensors = load_file(folder / TENSORS_FILE)
        except (OSError, SafetensorError) as error:
            raise OverlayError(f"{folder}: {TENSORS_FILE} cannot be read: {error}") from error
        _check(folder, facts, tensors)
        return cls(facts["keys"], tensors, facts["meta"])

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, index: int) -> DatasetItem:
        if not -len(self) <= index < len(self):
            raise IndexError(f"conversation {index} of {len(self)}")
        index %= len(self)
        where = slice(int(self._offsets[index]), int(self._offsets[index + 1]))
        return DatasetItem(
            self.keys[index], self._token_ids[where].astype(np.int64), self._loss_mask[where].astype(np.bool_)
        )

    def __iter__(self) -> Iterator[DatasetItem]:
        return (self[index] for index in range(len(self)))


def write_dataset(path: str | Path, items: Sequence[DatasetItem], meta: Mapping[str, Any]) -> None:
    """Write `items` as the folder `path`: complete or not at all.

    An existing empty folder is filled; an existing dataset with the same content is left as it is. Raises OverlayError
    when `path` holds anything else, when `items` is empty, and when two items have one key.
    """
    from safetensors.numpy import save_file

    folder = Path(path)
    keys = [item.key for item in items]
    if not keys:
        raise OverlayError(f"{folder}: a dataset needs at least one conversation")
    if len(set(keys)) < len(keys):
        raise OverlayError(f"{folder}: two conversations have one key: {next(k for k in keys if keys.count(k) > 1)!r}")
    tensors: dict[str, npt.NDArray[Any]] = {
        "token_ids": np.concatenate([item.token_ids for item in items]).astype(np.int32),
        "offsets": np.cumsum([0, *(len(item.token_ids) for item in items)], dtype=np.int64),
        "loss_mask": np.concatenate([item.loss_mask for item in items]).astype(np.uint8),
    }
    facts = {"format": FORMAT, "keys": keys, "meta": dict(meta)}
    _check(folder, facts, tensors)

    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as scratch:
        unfinished = Path(scratch) / "dataset"
        unfinished.mkdir()
        save_file(tensors, unfinished / TENSORS_FILE)
        (unfinished / FACTS_FILE).write_text(json.dumps(facts, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        if folder.is_dir() and any(folder.iterdir()):
            _require_same(folder, unfinished)
            return
        if folder.is_dir():
            folder.rmdir()
        unfinished.rename(folder)


def check_destination(path: str | Path, meta: Mapping[str, Any]) -> None:
    """Refuse now what `write_dataset` would refuse after the work: `path` holds something else than a dataset made with
    this `meta`.

    `meta` may be a part of what will be written. Raises OverlayError.
    """
    folder = Path(path)
    if folder.exists() and not folder.is_dir():
        raise OverlayError(f"{folder}: is a file; name a new folder for the dataset")
    if not folder.is_dir() or not any(folder.iterdir()):
        return
    if not (folder / FACTS_FILE).is_file():
        raise OverlayError(f"{folder}: is not empty and not a dataset; name a new folder")
    found = _read_facts(folder)["meta"]
    for name, value in meta.items():
        if found.get(name) != value:
            raise OverlayError(
                f"{folder}: holds a dataset made with other input ({name} is {found.get(name)!r}, now {value!r}); "
                "name a new folder"
            )


def _require_same(folder: Path, unfinished: Path) -> None:
    for name in (TENSORS_FILE, FACTS_FILE):
        file = folder / name
        if not file.is_file() or file.read_bytes() != (unfinished / name).read_bytes():
            raise OverlayError(
                f"{folder}: is not empty, and its {name} is not what would be written; name a new folder"
            )


def _read_facts(folder: Path) -> dict[str, Any]:
    try:
        facts = json.loads((folder / FACTS_FILE).read_text(encoding="utf-8"))
    except OSError as error:
        raise OverlayError(
            f"{folder}: is not a dataset ({FACTS_FILE}: {error.strerror}); make one with `prepare`"
        ) from error
    except ValueError as error:
        raise OverlayError(f"{folder}: {FACTS_FILE} is not JSON ({error})") from error
    if not isinstance(facts, dict) or facts.get("format") != FORMAT:
        raise OverlayError(
            f"{folder}: {FACTS_FILE} does not have format {FORMAT}; make the dataset anew with `prepare`"
        )
    return facts


def _check(folder: Path, facts: Mapping[str, Any], tensors: Mapping[str, npt.NDArray[Any]]) -> None:
    """Raises OverlayError unless keys, offsets, tokens and mask belong together."""
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    if set(shapes) != {"token_ids", "offsets", "loss_mask"}:
        raise OverlayError(f"{folder}: {TENSORS_FILE} has {sorted(shapes)}, expected token_ids, offsets and loss_mask")
    offsets = tensors["offsets"]
    whole = shapes["offsets"] == (len(facts["keys"]) + 1,) and offsets[0] == 0
    if (
        not whole
        or shapes["token_ids"] != (offsets[-1],)
        or shapes["loss_mask"] != (offsets[-1],)
        or (np.diff(offsets) < 1).any()
    ):
        raise OverlayError(f"{folder}: keys, offsets, token ids and loss mask do not belong together ({shapes})")
