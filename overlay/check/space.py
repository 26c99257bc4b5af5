"""Bytes: a token's rows, a dataset's on disk, and the host memory that rows wait in."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from vllm_overlay.capture.limits import HOST_BYTES
from vllm_overlay.check.line import Line
from vllm_overlay.check.model import ModelFacts
from vllm_overlay.model_shape import count_row_bytes, find_itemsize


def check_space(
    facts: ModelFacts, num_layers: int, num_tokens: int, capture: Path | None, dtype: str
) -> Iterator[Line]:
    """What rows take, and whether the capture folder can hold them. `num_tokens` are those of the dataset, `dtype` is
    VLLM_OVERLAY_DTYPE."""
    if num_tokens < 1:
        yield Line("disk", "fails", "a number of tokens above 0", str(num_tokens), "give --tokens as the dataset has")
        return
    itemsize = find_itemsize("auto")
    row = num_layers * count_row_bytes(facts.hidden_size, itemsize, dtype)
    needed = row * num_tokens
    if dtype == "fp8":
        expected, width = "in 8 bits, as VLLM_OVERLAY_DTYPE=fp8 says", f"({facts.hidden_size} + 4)"
    else:
        expected = "in the dtype that the model runs in, 16 bits unless --dtype float32"
        width = f"{facts.hidden_size} x {itemsize}"
    yield Line("rows", "ok", expected, f"{num_layers} layers x {width} bytes = {row} bytes a token")
    yield _check_disk(capture, needed, num_tokens)
    yield Line(
        "host memory",
        "ok",
        "room for rows on their way to the disk",
        f"{HOST_BYTES / 2**30:.1f} GiB, or 4 steps of max_num_batched_tokens if that is more; pinned on a GPU's host",
    )


def _check_disk(capture: Path | None, needed: int, num_tokens: int) -> Line:
    subject = "disk"
    wanted = f"{needed / 1e9:.1f} GB for {num_tokens} tokens"
    if capture is None:
        return Line(subject, "ok", wanted, "not looked at: VLLM_OVERLAY_CAPTURE is not set")
    folder = next(parent for parent in (capture, *capture.parents) if parent.exists())
    if not folder.is_dir():
        return Line(subject, "fails", "a folder that can be written", f"{folder} is a file", "name another folder")
    if not os.access(folder, os.W_OK) or not _can_write(folder):
        return Line(subject, "fails", "a folder that can be written", f"{folder} cannot be", "name another folder")
    free = shutil.disk_usage(folder).free
    found = f"{free / 1e9:.1f} GB free in {folder}"
    if free < needed:
        return Line(subject, "fails", wanted, found, "free some, capture fewer layers, or give --tokens as they are")
    return Line(subject, "ok", wanted, found)


def _can_write(folder: Path) -> bool:
    """Whether the file system lets anything be written there: root may write anywhere but where it is read-only."""
    return not os.statvfs(folder).f_flag & os.ST_RDONLY
