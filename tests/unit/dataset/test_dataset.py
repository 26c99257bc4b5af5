from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from vllm_overlay.dataset import Dataset, DatasetItem, write_dataset
from vllm_overlay.dataset.dataset import check_destination
from vllm_overlay.errors import OverlayError


def item(key: str, *token_ids: int) -> DatasetItem:
    ids = np.asarray(token_ids, np.int64)
    return DatasetItem(key, ids, ids % 2 == 1)


ITEMS = [item("a", 1, 2, 3), item("b", 70000), item("ü:3", 4, 5)]


def test_written_and_read(tmp_path: Path) -> None:
    write_dataset(tmp_path / "new" / "d", ITEMS, {"model": "m"})
    dataset = Dataset.open(tmp_path / "new" / "d")
    assert dataset.meta == {"model": "m"}
    assert len(dataset) == 3
    assert [(i.key, i.token_ids.tolist(), i.loss_mask.tolist()) for i in dataset] == [
        ("a", [1, 2, 3], [True, False, True]),
        ("b", [70000], [False]),
        ("ü:3", [4, 5], [False, True]),
    ]
    assert dataset[-1].key == "ü:3"
    assert dataset[1].token_ids.dtype == np.int64
    assert dataset[1].loss_mask.dtype == np.bool_
    with pytest.raises(IndexError):
        dataset[3]
    tensors = load_file(tmp_path / "new" / "d" / "dataset.safetensors")
    assert {name: (str(t.dtype), t.tolist()) for name, t in tensors.items()} == {
        "token_ids": ("int32", [1, 2, 3, 70000, 4, 5]),
        "offsets": ("int64", [0, 3, 4, 6]),
        "loss_mask": ("uint8", [1, 0, 1, 0, 0, 1]),
    }


def test_the_same_again_is_left_and_another_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "d"
    path.mkdir()  # an empty folder is filled
    write_dataset(path, ITEMS, {"model": "m"})
    before = {file.name: (file.stat().st_mtime_ns, file.read_bytes()) for file in path.iterdir()}
    write_dataset(path, ITEMS, {"model": "m"})
    for others, meta in ((ITEMS[:2], {"model": "m"}), (ITEMS, {"model": "n"})):
        with pytest.raises(OverlayError, match="is not empty"):
            write_dataset(path, others, meta)
    assert {file.name: (file.stat().st_mtime_ns, file.read_bytes()) for file in path.iterdir()} == before
    assert [file.name for file in tmp_path.iterdir()] == ["d"]


def test_refused_before_the_work(tmp_path: Path) -> None:
    path = tmp_path / "d"
    check_destination(path, {"model": "m"})
    write_dataset(path, ITEMS, {"model": "m", "tokenizer_sha256": "x"})
    check_destination(path, {"model": "m"})
    with pytest.raises(OverlayError, match=r"other input \(model is 'm', now 'n'\)"):
        check_destination(path, {"model": "n"})
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").touch()
    with pytest.raises(OverlayError, match="not empty and not a dataset"):
        check_destination(tmp_path / "mine", {})
    with pytest.raises(OverlayError, match="is a file"):
        check_destination(tmp_path / "mine" / "file", {})


def test_a_failed_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(json, "dumps", fail)  # the second of the two files
    with pytest.raises(OSError, match="No space left"):
        write_dataset(tmp_path / "d", ITEMS, {})
    assert list(tmp_path.iterdir()) == []


def test_bad_input(tmp_path: Path) -> None:
    with pytest.raises(OverlayError, match="at least one"):
        write_dataset(tmp_path / "d", [], {})
    with pytest.raises(OverlayError, match="one key: 'a'"):
        write_dataset(tmp_path / "d", [*ITEMS, item("a", 1)], {})
    with pytest.raises(OverlayError, match="do not belong together"):
        write_dataset(tmp_path / "d", [DatasetItem("a", np.zeros(3, np.int64), np.zeros(2, np.bool_))], {})
    assert list(tmp_path.iterdir()) == []


def test_what_is_not_a_whole_dataset(tmp_path: Path) -> None:
    path = tmp_path / "d"
    with pytest.raises(OverlayError, match="is not a dataset"):
        Dataset.open(path)
    write_dataset(path, ITEMS, {})
    facts = json.loads((path / "dataset.json").read_text())
    (path / "dataset.json").write_text(json.dumps({**facts, "keys": facts["keys"][:2]}))
    with pytest.raises(OverlayError, match="do not belong together"):
        Dataset.open(path)
    (path / "dataset.json").write_text(json.dumps({**facts, "format": 99}))
    with pytest.raises(OverlayError, match="format 1"):
        Dataset.open(path)
    (path / "dataset.json").write_text(json.dumps(facts))
    whole = (path / "dataset.safetensors").read_bytes()
    (path / "dataset.safetensors").write_bytes(whole[:-1])
    with pytest.raises(OverlayError, match=r"dataset\.safetensors cannot be read"):
        Dataset.open(path)
