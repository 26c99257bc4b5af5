"""What the `capture` command works out before an engine starts."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from vllm_overlay.dataset import DatasetItem, write_dataset
from vllm_overlay.errors import OverlayError
from vllm_overlay.fingerprint import fingerprint_model
from vllm_overlay.offline import capture
from vllm_overlay.offline.capture import capture_dataset, estimate_bytes, find_done, find_spans, take_group
from vllm_overlay.store import PendingRecord, StoreMeta, StoreWriter


def write_model(folder: Path, hidden: int = 2880, layers: int = 24) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"hidden_size": hidden, "num_hidden_layers": layers}))
    return folder


def make_item(key: str, length: int) -> DatasetItem:
    return DatasetItem(key, np.arange(length, dtype=np.int64), np.ones(length, dtype=np.bool_))


def test_the_estimate() -> None:
    """CASES 18: 1,000 prompts x 4,096 tokens x 4 layers x 2,880 x 2 bytes."""
    assert estimate_bytes(1000 * 4096, 4, 2880, 2) == 94_371_840_000


def test_too_small_a_disk_is_refused_before_the_model_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CASES 18: with 50 GB free."""
    monkeypatch.setattr(capture.shutil, "disk_usage", lambda folder: SimpleNamespace(free=50 * 10**9))
    items = [make_item(f"i{i}", 4096) for i in range(1000)]
    write_dataset(tmp_path / "data", items, {})
    model = write_model(tmp_path / "model")
    with pytest.raises(OverlayError, match=r"need 94\.4 GB in .*, which has 50\.0 GB free"):
        capture_dataset(
            tmp_path / "data", model=str(model), store=tmp_path / "store", layers="eagle3", engine_options=[]
        )
    assert not (tmp_path / "store").exists()


def make_store(tmp_path: Path, model: Path, tokens: int = 2) -> Path:
    """A store with one record of the key i0."""
    meta = StoreMeta((1,), 4, "float32", 2, "toy", fingerprint_model(str(model), {}), "0.16.0", "V1")
    import torch

    with StoreWriter.open(tmp_path / "store", meta) as writer:
        writer.append(torch.ones(tokens, 1, 4))
        count = np.arange(tokens)
        writer.commit([PendingRecord("r", count, count, tokens, True, "length", "i0", None)])
    return tmp_path / "store"


def test_nothing_left_to_do_starts_no_engine(tmp_path: Path) -> None:
    """CASES 20: everything is there already; the options would be refused by any engine."""
    model = write_model(tmp_path / "model", hidden=4, layers=2)
    store = make_store(tmp_path, model)
    write_dataset(tmp_path / "data", [make_item("i0", 2)], {})
    summary = capture_dataset(
        tmp_path / "data", model=str(model), store=store, layers="1", engine_options=["--no-such-option"]
    )
    assert (summary.captured, summary.already_there, summary.num_tokens) == (0, 1, 0)


def test_a_record_of_other_tokens_is_not_the_item(tmp_path: Path) -> None:
    """An interrupted engine leaves the first rows of an aborted request under the item's key."""
    store = make_store(tmp_path, write_model(tmp_path / "model", hidden=4, layers=2), tokens=2)
    assert find_done(store, [make_item("i0", 2), make_item("other", 2)]) == {"i0"}
    assert find_done(store, [make_item("i0", 3)]) == set()


def test_a_store_of_other_layers_or_weights_is_refused_before_the_model_loads(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", hidden=4, layers=2)
    store = make_store(tmp_path, model)
    write_dataset(tmp_path / "data", [make_item("i0", 2)], {})
    with pytest.raises(OverlayError, match=r"holds the layers \(1,\), asked for are \(2,\)"):
        capture_dataset(tmp_path / "data", model=str(model), store=store, layers="2", engine_options=[])
    other = write_model(tmp_path / "other", hidden=8, layers=2)
    with pytest.raises(OverlayError, match=r"holds states of other weights \(toy\)"):
        capture_dataset(tmp_path / "data", model=str(other), store=store, layers="1", engine_options=[])


def test_layers_that_do_not_exist_are_refused_before_the_model_loads(tmp_path: Path) -> None:
    write_dataset(tmp_path / "data", [make_item("i0", 2)], {})
    model = write_model(tmp_path / "model", layers=24)
    with pytest.raises(OverlayError, match=r"layer ids \[25\] do not exist: this model has ids 0 to 24"):
        capture_dataset(tmp_path / "data", model=str(model), store=tmp_path / "s", layers="2,25", engine_options=[])


@pytest.mark.parametrize(
    ("mask", "spans"),
    [("", []), ("000", []), ("111", [[0, 3]]), ("0110", [[1, 3]]), ("101", [[0, 1], [2, 3]])],
)
def test_spans_of_a_mask(mask: str, spans: list[list[int]]) -> None:
    assert find_spans(np.array([bit == "1" for bit in mask], dtype=np.bool_)) == spans


def test_groups_hold_about_so_many_tokens_and_never_none() -> None:
    items = [make_item(f"i{i}", length) for i, length in enumerate((5, 5, 5, 30, 1))]
    taken = []
    while items:
        group, items = take_group(items, 10)
        taken.append([len(item.token_ids) for item in group])
    assert taken == [[5, 5], [5, 30], [1]]
