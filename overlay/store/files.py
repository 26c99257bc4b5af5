"""The files of a store as its reader sees them, and those of a folder of this machine."""

from __future__ import annotations

import os
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_overlay.store.errors import StoreError, naming_path
from vllm_overlay.store.index import Index
from vllm_overlay.store.log import SHARDS_FOLDER
from vllm_overlay.store.meta import StoreMeta
from vllm_overlay.store.shard import Shard, read_data_start

# A terabyte: a process may hold 65,530 maps unless it is told otherwise.
MOST_MAPS = 8192

ALLOCATION_UNIT = 512  # bytes in a block of st_blocks, whatever the filesystem's own block is (stat(2))

AnyPath = TypeVar("AnyPath", covariant=True)


@dataclass(frozen=True)
class Piece:
    """Rows `first`..`first + count - 1`, counted within one shard file. `file` is relative to the store."""

    file: str
    first: int
    count: int


class StoreFiles(Protocol[AnyPath]):
    """What a reader asks of a store's folder. Everything raises StoreError if a file is missing or cut short."""

    @property
    def path(self) -> AnyPath:
        """The folder, as messages name it."""
        ...

    def open_index(self) -> Index:
        """A connection to the index, for this process alone."""
        ...

    def view(self, piece: Piece, meta: StoreMeta) -> torch.Tensor:
        """Rows of a log with this meta as they are stored, `[count, *meta.stored_shape]`; without a copy if it can."""
        ...

    def take(self, file: str, rows: NDArray[np.int64], meta: StoreMeta, out: NDArray[np.uint8]) -> None:
        """Fill `out` `[n, meta.row_bytes]` with the rows `[n]` of one shard file, counted within it."""
        ...

    def read_into(self, piece: Piece, meta: StoreMeta, out: memoryview) -> None:
        """Fill `out` with the bytes of whole rows as they are in the file now."""
        ...

    def measure(self) -> int:
        """Bytes that the store takes where it is."""
        ...


class LocalFiles:
    """A folder of this machine, each shard mapped into memory when it is first needed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._maps: OrderedDict[str, ShardMap] = OrderedDict()

    def open_index(self) -> Index:
        return Index.open_for_reading(self.path)

    def view(self, piece: Piece, meta: StoreMeta) -> torch.Tensor:
        rows = self._map(piece.file, meta).rows[piece.first : piece.first + piece.count]
        if len(rows) < piece.count:
            last = piece.first + piece.count - 1
            raise StoreError(f"{self.path / piece.file} is cut short: rows {piece.first}..{last} are not all there")
        return rows

    def take(self, file: str, rows: NDArray[np.int64], meta: StoreMeta, out: NDArray[np.uint8]) -> None:
        content = self._map(file, meta).content
        if rows.max() >= len(content):
            raise StoreError(f"{self.path / file} is cut short: row {rows.max()} is not there")
        # By numpy: torch's cat of a view a row takes several times as long for rows of some kilobytes (2.11).
        # "clip", as no row is outside: with "raise" numpy makes another copy.
        np.take(content, rows, axis=0, out=out, mode="clip")

    def read_into(self, piece: Piece, meta: StoreMeta, out: memoryview) -> None:
        """From disk, not from the maps, which this process may have written to."""
        shard = Shard.open(self.path / piece.file, meta)
        try:
            shard.read(piece.first, out)
        finally:
            shard.close()

    def measure(self) -> int:
        """What the filesystem has set aside."""
        with naming_path("read", self.path):
            # Not the whole tree: replicas have their stores in the folder.
            files = [*self.path.iterdir(), *(self.path / SHARDS_FOLDER).iterdir()]
            return sum(path.stat().st_blocks * ALLOCATION_UNIT for path in files if path.is_file())

    def _map(self, file: str, meta: StoreMeta) -> ShardMap:
        if file not in self._maps:
            self._maps[file] = _map_shard(self.path / file, meta)
        self._maps.move_to_end(file)
        # A tensor of rows keeps its map alive after it has gone from here.
        while len(self._maps) > MOST_MAPS:
            self._maps.popitem(last=False)
        return self._maps[file]


@dataclass(frozen=True)
class ShardMap:
    """A shard file in memory: its rows, `[rows, *meta.stored_shape]`, and the same as bytes, `[rows, row_bytes]`."""

    rows: torch.Tensor
    content: NDArray[np.uint8]


def _map_shard(path: Path, meta: StoreMeta) -> ShardMap:
    """The map is private and writable, as for `torch.load(mmap=True)`: PyTorch has no read-only tensors, and warns
    about read-only memory because a write to it would kill the process. What is written to it stays in this process. It
    keeps no file open.
    """
    with naming_path("open", path):
        fd = os.open(path, os.O_RDONLY)
        try:
            start = read_data_start(fd, path)
            rows = (os.fstat(fd).st_size - start) // meta.row_bytes
        finally:
            os.close(fd)
    if rows < 0:
        raise StoreError(f"{path} is cut short: it ends within its header")
    try:
        content = torch.from_file(str(path), shared=False, size=start + rows * meta.row_bytes, dtype=torch.uint8)
    except RuntimeError as error:
        raise StoreError(f"cannot map {path}: {error}") from error
    content = content[start:].view(rows, meta.row_bytes)
    return ShardMap(content.view(meta.stored_dtype).view(rows, *meta.stored_shape), content.numpy())
