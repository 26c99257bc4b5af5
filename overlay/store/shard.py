"""A shard: one safetensors file with the tensor `hidden_states` `[rows, layers, hidden]`, or, in a store of float8,
`packed_hidden_states` uint8 `[rows, layers, hidden + 4]` (see float8.py).

The header for the full number of rows is written first and the file is given its full, sparse size before it gets its
name, so that it is valid from the moment it can be seen. Its length is a multiple of 8 and stays as it is: a header for
fewer rows is shorter and is padded with spaces, which the format allows
(https://github.com/huggingface/safetensors#format). The place of a row never changes.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from vllm_overlay.store.errors import StoreError, naming_path
from vllm_overlay.store.meta import SAFETENSORS_DTYPES, StoreMeta

FORMAT_VERSION = "1"
TENSOR, PACKED_TENSOR = "hidden_states", "packed_hidden_states"
LENGTH_BYTES = 8  # before the header: its length as a little-endian unsigned 64-bit number

# Larger than any header of ours; a longer one means that the file is something else.
LONGEST_HEADER = 1 << 20


def write_header(meta: StoreMeta, rows: int) -> bytes:
    header = {
        "__metadata__": {
            "format": "vllm-overlay rows",
            "format_version": FORMAT_VERSION,
            "layer_ids": json.dumps(meta.layer_ids),
        },
        PACKED_TENSOR if meta.is_packed else TENSOR: {
            "dtype": SAFETENSORS_DTYPES[meta.dtype],
            "shape": [rows, *meta.stored_shape],
            "data_offsets": [0, rows * meta.row_bytes],
        },
    }
    return json.dumps(header, separators=(",", ":")).encode()


def frame_header(text: bytes, length: int) -> bytes:
    """The header padded to `length` bytes, after its length."""
    return length.to_bytes(LENGTH_BYTES, "little") + text.ljust(length)


def write_fully(fd: int, data: memoryview, offset: int, path: Path) -> None:
    """Positional write of all of `data` (bytes), in as many calls as it takes. Raises StoreError."""
    while data:
        with naming_path("write", path):
            written = os.pwrite(fd, data, offset)
        if not written:
            raise StoreError(f"cannot write {path}: the system took none of {len(data)} bytes")
        data = data[written:]
        offset += written


def sync_folder(folder: Path) -> None:
    """Make the names in `folder` survive a power cut."""
    with naming_path("sync", folder):
        fd = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def read_data_start(fd: int, path: Path) -> int:
    """Offset in bytes of row 0."""
    with naming_path("read", path):
        prefix = os.pread(fd, LENGTH_BYTES, 0)
    return find_data_start(prefix, path)


def find_data_start(prefix: bytes, path: object) -> int:
    """The same from the first LENGTH_BYTES of a file. Raises StoreError, which names `path`, if it is no shard."""
    length = int.from_bytes(prefix, "little")
    if len(prefix) < LENGTH_BYTES or not 0 < length <= LONGEST_HEADER:
        raise StoreError(f"{path} is not a shard of a store: it has no safetensors header")
    return LENGTH_BYTES + length


class Shard:
    """One shard file, open. Rows are counted from 0 within the file, data are plain bytes of whole rows."""

    def __init__(self, path: Path, fd: int, row_bytes: int) -> None:
        self.path = path
        self._fd = fd
        self._row_bytes = row_bytes
        self._data_start = read_data_start(fd, path)

    @classmethod
    def create(cls, path: Path, meta: StoreMeta, rows: int) -> Shard:
        """Make a shard for `rows` rows, open to read and write. Raises StoreError and then leaves nothing.

        Its name survives a power cut when `sync_folder` has been called.
        """
        text = write_header(meta, rows)
        header = frame_header(text, -(-len(text) // 8) * 8)
        unnamed = path.with_name(path.name + ".new")
        with naming_path("create", path):
            fd = os.open(unnamed, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o666)
            try:
                write_fully(fd, memoryview(header), 0, path)
                os.ftruncate(fd, len(header) + rows * meta.row_bytes)
                unnamed.rename(path)
                return cls(path, fd, meta.row_bytes)
            except BaseException:
                os.close(fd)
                unnamed.unlink(missing_ok=True)
                path.unlink(missing_ok=True)
                raise

    @classmethod
    def open(cls, path: Path, meta: StoreMeta) -> Shard:
        """Open a shard for reading. Raises StoreError if it is missing or no shard."""
        with naming_path("open", path):
            fd = os.open(path, os.O_RDONLY)
        try:
            return cls(path, fd, meta.row_bytes)
        except BaseException:
            os.close(fd)
            raise

    def write(self, row: int, data: memoryview) -> None:
        write_fully(self._fd, data, self._data_start + row * self._row_bytes, self.path)

    def read(self, row: int, out: memoryview) -> None:
        """Fill `out` (writable bytes) from `row` on. Raises StoreError if the file ends before."""
        offset = self._data_start + row * self._row_bytes
        while out:
            with naming_path("read", self.path):
                got = os.preadv(self._fd, [out], offset)
            if not got:
                raise StoreError(f"{self.path} is cut short: it ends at byte {offset}, {len(out)} bytes too early")
            out = out[got:]
            offset += got

    def sync(self) -> None:
        with naming_path("sync", self.path):
            os.fdatasync(self._fd)

    def close(self) -> None:
        os.close(self._fd)


def shrink_shard(path: Path, meta: StoreMeta, rows: int) -> None:
    """Make the file end after `rows` rows, in its header and on disk. Raises StoreError if it does not hold as many.

    Between the two writes other programs find the header and the size at odds; a store's own reader looks at neither.
    """
    with naming_path("open", path):
        fd = os.open(path, os.O_RDWR)
    try:
        data_start = read_data_start(fd, path)
        size = data_start + rows * meta.row_bytes
        if os.fstat(fd).st_size < size:
            raise StoreError(
                f"{path} is cut short: its records need {size} bytes; `vllm-overlay inspect --verify` names them"
            )
        write_fully(fd, memoryview(frame_header(write_header(meta, rows), data_start - LENGTH_BYTES)), 0, path)
        with naming_path("shorten", path):
            os.ftruncate(fd, size)
            os.fsync(fd)
    finally:
        os.close(fd)
