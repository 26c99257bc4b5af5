"""A store's folder somewhere that fsspec reads: an object store, another machine. For reading only, and as it was when
it was opened.

The index is fetched whole at the opening, the rows of a record when they are asked for, by ranges of the shard files.
fsspec comes with torch; what speaks a protocol (s3fs, gcsfs) may have to be installed beside it.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import unquote, urlsplit

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_overlay.store.errors import StoreError
from vllm_overlay.store.extents import find_extents
from vllm_overlay.store.files import LocalFiles, Piece, StoreFiles
from vllm_overlay.store.index import INDEX_FILE, Index
from vllm_overlay.store.log import SHARDS_FOLDER
from vllm_overlay.store.meta import StoreMeta
from vllm_overlay.store.shard import LENGTH_BYTES, find_data_start
from vllm_overlay.urls import is_url


@dataclass(frozen=True)
class RemotePath:
    """What stands for a Path that pathlib would mangle: s3://a is s3:/a to it."""

    url: str

    @property
    def name(self) -> str:
        return PurePosixPath(self.url).name

    def __truediv__(self, name: str) -> RemotePath:
        return RemotePath(f"{self.url.rstrip('/')}/{name}")

    def __str__(self) -> str:
        return self.url


# Where a store may be.
StorePath = Path | RemotePath


def find_path(folder: str | os.PathLike[str] | RemotePath) -> StorePath:
    """The folder as a path; a URL of this machine's own files (file://) is one of theirs."""
    if isinstance(folder, RemotePath):
        return folder
    text = os.fspath(folder)
    if not is_url(text):
        return Path(text)
    parts = urlsplit(text)
    return Path(unquote(parts.path)) if parts.scheme == "file" and not parts.netloc else RemotePath(text)


def find_files(path: StorePath) -> StoreFiles[StorePath]:
    return RemoteFiles(path) if isinstance(path, RemotePath) else LocalFiles(path)


class RemoteFiles:
    """The files of a remote store. Raises StoreError where one cannot be read, whatever fsspec raises."""

    def __init__(self, path: RemotePath) -> None:
        self.path = path
        self._data_starts: dict[str, int] = {}

    def find_stores(self, prefix: str) -> list[RemotePath]:
        """The stores in the folder: itself if it is one, then those in folders with this prefix, by name."""
        with self._reading(self.path) as (files, root):
            own = [self.path] if files.exists(f"{root}/{INDEX_FILE}") else []
            replicas = sorted(files.glob(f"{root}/{prefix}*/{INDEX_FILE}"))
        return [*own, *(self.path / PurePosixPath(found).parent.name for found in replicas)]

    def open_index(self) -> Index:
        """A copy of the index, which is gone from the disk when it is closed."""
        self._refuse_writers()
        with tempfile.TemporaryDirectory(prefix="vllm-overlay-index-") as folder:
            with self._reading(self.path / INDEX_FILE) as (files, root):
                if not files.exists(f"{root}/{INDEX_FILE}"):
                    raise StoreError(f"{self.path} is not a store: it has no {INDEX_FILE}")
                files.get_file(f"{root}/{INDEX_FILE}", f"{folder}/{INDEX_FILE}")
            return Index.open_copy(Path(folder), self.path)

    def view(self, piece: Piece, meta: StoreMeta) -> torch.Tensor:
        """`[rows, layers, hidden]`, or packed rows, in memory of their own."""
        content = bytearray(self._fetch(piece, meta))
        return torch.frombuffer(content, dtype=torch.uint8).view(meta.stored_dtype).view(-1, *meta.stored_shape)

    def take(self, file: str, rows: NDArray[np.int64], meta: StoreMeta, out: NDArray[np.uint8]) -> None:
        at = 0
        for first, count in find_extents(rows).tolist():
            content = self._fetch(Piece(file, first, count), meta)
            out[at : at + count] = np.frombuffer(content, dtype=np.uint8).reshape(count, meta.row_bytes)
            at += count

    def read_into(self, piece: Piece, meta: StoreMeta, out: memoryview) -> None:
        out[:] = self._fetch(piece, meta)

    def measure(self) -> int:
        """Bytes of the files in the store's folder and its shards'."""
        with self._reading(self.path) as (files, root):
            folders = [root, f"{root}/{SHARDS_FOLDER}"]  # an object store has no empty ones
            found = [each for folder in folders if files.exists(folder) for each in files.ls(folder, detail=True)]
        return sum(int(each["size"]) for each in found if each["type"] == "file")

    def _fetch(self, piece: Piece, meta: StoreMeta) -> bytes:
        path = self.path / piece.file
        with self._reading(path) as (files, root):
            file = f"{root}/{piece.file}"
            if piece.file not in self._data_starts:
                prefix = files.cat_file(file, start=0, end=LENGTH_BYTES)
                self._data_starts[piece.file] = find_data_start(prefix, path)
            start = self._data_starts[piece.file] + piece.first * meta.row_bytes
            content: bytes = files.cat_file(file, start=start, end=start + piece.count * meta.row_bytes)
        if len(content) < piece.count * meta.row_bytes:
            last = piece.first + piece.count - 1
            raise StoreError(f"{path} is cut short: rows {piece.first}..{last} are not all there")
        return content

    def _refuse_writers(self) -> None:
        """What is committed and not in the index's own file yet could not be read from a copy of that."""
        for log in (f"{INDEX_FILE}-wal", f"{INDEX_FILE}-journal"):
            with self._reading(self.path / log) as (files, root):
                if files.exists(f"{root}/{log}") and files.size(f"{root}/{log}"):
                    raise StoreError(
                        f"{self.path} is being written, or its writer died ({log} is not empty): such a store is read "
                        f"on its own machine only; open it there once, or copy it with `vllm-overlay copy`"
                    )

    @contextmanager
    def _reading(self, path: RemotePath) -> Iterator[tuple[Any, str]]:
        """The file system and the folder's path in it, found anew each time: not all of them survive a fork."""
        fsspec = _import_fsspec(self.path)
        try:
            files, root = fsspec.core.url_to_fs(self.path.url)
            yield files, str(root).rstrip("/")
        except StoreError:
            raise
        except Exception as error:
            # Beside OSError: a protocol that nobody speaks or whose library is missing, and the libraries' own errors.
            raise StoreError(f"cannot read {path}: {type(error).__name__}: {error}".splitlines()[0]) from error


def _import_fsspec(path: RemotePath) -> Any:
    try:
        import fsspec.core
    except ModuleNotFoundError as error:
        raise StoreError(f"{path} is read through fsspec: pip install 'vllm-overlay[remote]'") from error
    return fsspec
