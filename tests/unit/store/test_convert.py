"""Stores to and from vLLM's and speculators' files."""

from __future__ import annotations

import fcntl
import importlib
import importlib.metadata
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests.unit.store.conftest import MakeMeta, MakeRecord, MakeRows
from vllm_overlay.cli import main
from vllm_overlay.store import Store, StoreError, StoreMeta, StoreWriter, record_files
from vllm_overlay.store.record_files import from_ours, to_ours, write_record_files


@pytest.fixture
def store(store_path: Path, meta: StoreMeta, make_rows: MakeRows, make_record: MakeRecord) -> Path:
    """Layers 2, 1 and 6 of a target with 6: a record with a loss mask and a tag, one without, an incomplete one, and
    a second one of the first's request."""
    mask = np.array([False, True, True])
    with StoreWriter.open(store_path, meta) as writer:
        writer.append(make_rows(12))
        writer.commit(
            [
                make_record("a/1", range(3), loss_mask=mask, tag="x", num_prompt_tokens=1, finish_reason="stop"),
                make_record("b", range(3, 8), num_prompt_tokens=2, first_position=7),
                make_record("c", [8, -1, 9]),
                make_record("a/1", range(10, 12)),
            ]
        )
    return store_path


class ColumnsOnly:
    """As much of a `datasets.Dataset` as conversion uses, for where the library is not installed."""

    def __init__(self, columns: dict[str, list[Any]]) -> None:
        self._columns = columns
        self._as_torch = False

    def __len__(self) -> int:
        return len(self._columns["input_ids"])

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        assert self._as_torch
        return {name: torch.as_tensor(values[number]) for name, values in self._columns.items()}

    def set_format(self, name: str) -> None:
        assert name == "torch"
        self._as_torch = True

    def with_format(self, name: str) -> ColumnsOnly:
        self.set_format(name)
        return self

    def save_to_disk(self, folder: Path) -> None:
        columns = {name: [np.asarray(value).tolist() for value in values] for name, values in self._columns.items()}
        (folder / "dataset_info.json").write_text(json.dumps(columns))

    @classmethod
    def load(cls, folder: str) -> ColumnsOnly:
        rows = cls(json.loads(Path(folder, "dataset_info.json").read_text()))
        rows.set_format("torch")
        return rows


def imports_datasets() -> bool:
    try:
        importlib.import_module("datasets")
    except (ImportError, AttributeError):
        return False
    return True


@pytest.fixture
def datasets(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The library, or what stands in for it: vLLM does not need it, and that of 0.11.0's environment is too old."""
    if not imports_datasets():
        module = SimpleNamespace(
            Dataset=SimpleNamespace(from_dict=ColumnsOnly),
            disable_progress_bars=lambda: None,
            load_from_disk=ColumnsOnly.load,
        )
        monkeypatch.setitem(sys.modules, "datasets", module)
    return importlib.import_module("datasets")


def read_metadata(path: Path) -> dict[str, str]:
    with safe_open(path, framework="pt") as content:
        return dict(content.metadata())


def test_ids_after_a_layer_are_one_less_than_ours() -> None:
    """CASES.md 16: "after layer, 0-based" [1, 2, 3] imports as [2, 3, 4]; the round trip is the identity."""
    assert to_ours([1, 2, 3], "after-layer") == (2, 3, 4)
    assert from_ours(to_ours([1, 2, 3], "after-layer"), "after-layer") == (1, 2, 3)
    assert to_ours([1, 2, 3], "residual") == from_ours([1, 2, 3], "residual") == (1, 2, 3)
    with pytest.raises(StoreError, match="layer id 0, the embedding output, has no number"):
        from_ours([0, 2], "after-layer")


def test_files_of_vllm(store: Path, tmp_path: Path, make_rows: MakeRows, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "files"
    assert main(["convert", str(store), "-o", str(folder), "--to", "vllm"]) == 0
    assert "3 records written" in capsys.readouterr().out
    names = {"a_1", "a_1~2", "b"}
    # Beside each an empty .lock, which load_hidden_states of vLLM 0.32 opens.
    assert {path.name for path in folder.iterdir()} == {
        f"{name}.safetensors{end}" for name in names for end in ("", ".lock")
    }
    tensors = load_file(folder / "a_1.safetensors")
    assert torch.equal(tensors["hidden_states"], make_rows(12)[:3])
    assert tensors["token_ids"].tolist() == [100, 101, 102] and tensors["token_ids"].dtype == torch.int64
    metadata = read_metadata(folder / "a_1.safetensors")
    assert (metadata["layer_ids"], metadata["layer_ids_mean"]) == ("[2, 1, 6]", "residual")
    assert "residual stream after k decoder layers" in metadata["layer_ids_mean_that"]


@pytest.mark.parametrize("layout", ["vllm", "speculators"])
@pytest.mark.parametrize("ids", ["residual", "after-layer"])
def test_there_and_back(layout: str, ids: str, store: Path, tmp_path: Path, datasets: Any) -> None:
    """CASES.md 16: the round trip is the identity, of what the layout has a place for."""
    files, back = tmp_path / "files", tmp_path / "back"
    assert main(["convert", str(store), "-o", str(files), "--to", layout, "--ids", ids]) == 0
    (first, *_) = sorted(files.rglob("*.safetensors"))
    assert read_metadata(first)["layer_ids"] == ("[2, 1, 6]" if ids == "residual" else "[1, 0, 5]")
    assert main(["convert", str(files), "-o", str(back), "--from", layout]) == 0
    with Store.open(store) as before, Store.open(back) as after:
        assert after.meta == before.meta
        assert list(after.verify()) == []
        complete = [record for record in before if record.complete]
        # speculators counts positions from 0 in every file, and would train a window at the wrong ones.
        kept = sorted((one for one in complete if layout == "vllm" or not one.first_position), key=describe)
        assert len(kept) == (3 if layout == "vllm" else 2)
        found = sorted(after, key=describe)
        assert [describe(record) for record in found] == [describe(record) for record in kept]
        for record, other in zip(kept, found, strict=True):
            assert torch.equal(record.hidden_states, other.hidden_states)


def describe(record: Any) -> tuple[Any, ...]:
    mask = record.loss_mask
    if mask is None:  # as speculators' data set has it
        mask = torch.arange(len(record.token_ids)) >= record.num_prompt_tokens
    facts = (record.num_prompt_tokens, record.finish_reason, record.tag or "", record.first_position)
    return (record.request_id, len(record.token_ids), record.token_ids.tolist(), mask.tolist(), facts)


def test_speculators_layout_has_the_last_state_last(
    tmp_path: Path, make_meta: MakeMeta, make_rows: MakeRows, make_record: MakeRecord, datasets: Any
) -> None:
    """As ArrowDataset of speculators 0.9.0 reads it: columns but the last are features, the last is the target's; of
    the data set it takes input_ids and loss_mask as tensors, and seq_len."""
    with StoreWriter.open(tmp_path / "store", make_meta(layer_ids=(6, 1, 2))) as writer:
        writer.append(make_rows(5))
        writer.commit([make_record("a", range(5), num_prompt_tokens=2)])
    assert main(["convert", str(tmp_path / "store"), "-o", str(tmp_path / "out"), "--to", "speculators"]) == 0
    tensors = load_file(tmp_path / "out" / "hidden_states" / "hs_0.safetensors")
    assert torch.equal(tensors["hidden_states"], make_rows(5)[:, [1, 2, 0]])
    rows = datasets.load_from_disk(str(tmp_path / "out"))
    assert len(rows) == 1 and set(rows[0]) == {"input_ids", "loss_mask", "seq_len"}
    assert rows[0]["loss_mask"].tolist() == [0, 0, 1, 1, 1]
    assert torch.equal(rows[0]["input_ids"], tensors["token_ids"])
    assert rows[0]["seq_len"] == 5


def has_speculators_0_9() -> bool:
    try:
        major, minor, *_ = importlib.metadata.version("speculators").split(".")
    except importlib.metadata.PackageNotFoundError:
        return False
    return (int(major), int(minor)) >= (0, 9)


def test_speculators_own_reader_reads_ours(store: Path, tmp_path: Path, make_rows: MakeRows) -> None:
    """Where speculators 0.9 is installed, which no vLLM of ours goes with; its classes need no engine."""
    if not has_speculators_0_9():
        pytest.skip("speculators 0.9 is not installed: the layout is held against constants above")
    from speculators.train import data

    assert main(["convert", str(store), "-o", str(tmp_path / "out"), "--to", "speculators"]) == 0
    dataset = data.ArrowDataset(max_len=16, datapath=tmp_path / "out", on_missing="raise")
    assert len(dataset) == 2 and dataset.approx_lengths == [3, 2]
    sample = dataset[0]
    assert torch.equal(sample["hidden_states"], make_rows(12)[:3, :2].flatten(1))
    assert torch.equal(sample["verifier_last_hidden_states"], make_rows(12)[:3, 2])
    assert sample["loss_mask"].tolist() == [0, 1, 1] and sample["input_ids"].tolist() == [*range(100, 103)]


def test_files_of_others(tmp_path: Path, make_rows: MakeRows, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing but the two tensors: the layers, what their ids mean and the target are the user's to say."""
    files, model = tmp_path / "files", tmp_path / "model"
    files.mkdir()
    for number, name in enumerate(("cmpl-1", "cmpl-2")):
        tensors = {"hidden_states": make_rows(4, seed=number), "token_ids": torch.arange(4) + number}
        save_file(tensors, files / f"{name}.safetensors")
    (files / "cmpl-1.safetensors.lock").touch()
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"num_hidden_layers": 6}))
    command = ["convert", str(files), "-o", str(tmp_path / "out"), "--from", "vllm"]
    assert main(command) == 1
    assert "does not say which layers it holds: name them with --layers" in capsys.readouterr().err
    assert main([*command, "--layers", "1,2,3"]) == 1
    assert "name the target's folder with --model" in capsys.readouterr().err
    assert main([*command, "--layers", "1,2", "--model", str(model)]) == 1
    assert "has 3 layers, not the 2 of [1, 2]" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert main([*command, "--layers", "1,2,3", "--ids", "after-layer", "--model", str(model)]) == 0
    assert "2 of the files have no loss mask and do not say where the prompt ends" in capsys.readouterr().out
    with Store.open(tmp_path / "out") as store:
        assert store.layer_ids == (2, 3, 4) and store.meta.num_hidden_layers == 6
        assert [record.request_id for record in store] == ["cmpl-1", "cmpl-2"]
        assert torch.equal(store["cmpl-2"].hidden_states, make_rows(4, seed=1))
        assert store["cmpl-2"].token_ids.tolist() == [1, 2, 3, 4]
        # Not the generated tokens alone, of which there would be none: nothing could be learnt from the store.
        assert [record.loss_mask.tolist() for record in store if record.loss_mask is not None] == [[True] * 4] * 2


def test_fp8_files_are_read_with_their_scales(tmp_path: Path, make_rows: MakeRows) -> None:
    """As Fp8HiddenStatesConnector of speculators 0.9.0 writes them: one float32 scale a token, [T, 1, 1]."""
    rows = make_rows(4)
    scales = rows.abs().amax(dim=(1, 2), keepdim=True) / 448
    tensors = {"hidden_states": (rows / scales).to(torch.float8_e4m3fn), "hidden_states_scales": scales}
    (tmp_path / "files").mkdir()
    save_file(tensors | {"token_ids": torch.arange(4)}, tmp_path / "files" / "hs_0.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"num_hidden_layers": 6}}))
    command = ["convert", str(tmp_path / "files"), "-o", str(tmp_path / "out"), "--from", "speculators"]
    assert main([*command, "--layers", "2,3,6", "--model", str(tmp_path)]) == 0
    with Store.open(tmp_path / "out") as store:
        assert store.meta.dtype == "bfloat16"
        # e4m3 has 3 bits after the point, bfloat16 has 7.
        error = (store[0].hidden_states.float() - rows).abs()
        assert (error <= rows.abs() * (2**-4 + 2**-8) + scales * 2**-10).all() and error.max() > 0


def test_a_damaged_or_unfinished_file_is_named_and_leaves_nothing(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = tmp_path / "files"
    assert main(["convert", str(store), "-o", str(files), "--to", "vllm"]) == 0
    command = ["convert", str(files), "-o", str(tmp_path / "out"), "--from", "vllm"]
    before = sorted(tmp_path.iterdir())
    with (files / "b.safetensors.lock").open("r+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert main(command) == 1
    assert "b.safetensors is still being written" in capsys.readouterr().err
    path = files / "b.safetensors"
    path.write_bytes(path.read_bytes()[:-5])
    assert main(command) == 1
    assert "b.safetensors is no whole safetensors file" in capsys.readouterr().err
    save_file({"hidden_states": torch.zeros(5, 3, 9), "token_ids": torch.arange(5)}, path)
    assert main(command) == 1
    assert "b.safetensors has rows [3, 9] of torch.float32" in capsys.readouterr().err
    assert main([*command, "--layers", "1,2,3"]) == 1
    assert "says that it holds layers [2, 1, 6], not [1, 2, 3]" in capsys.readouterr().err
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("layer_ids", "1,2,6", "layer_ids of its metadata is '1,2,6', where a list in JSON is expected"),
        ("layer_ids", '["one"]', "layer_ids of its metadata is ['one'], where numbers are expected"),
        ("layer_ids_mean", "hf", "layer_ids_mean of its metadata is 'hf', which is none of residual, after-layer"),
        ("vllm_overlay", "x", "vllm_overlay of its metadata is 'x', where a dict in JSON is expected"),
        ("vllm_overlay", '{"num_prompt_tokens": "2"}', "num_prompt_tokens of its metadata is '2', of the wrong type"),
        ("vllm_overlay", '{"store": {"layer_ids": [2]}}', "what its metadata says of its store is not whole ("),
        ("vllm_overlay", '{"store": {"model": "m"}}', "what its metadata says of its store is not whole ('layer_ids')"),
    ],
)
def test_metadata_that_cannot_be_is_one_line(
    name: str, text: str, said: str, tmp_path: Path, make_rows: MakeRows, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "files").mkdir()
    file = tmp_path / "files" / "a.safetensors"
    metadata = {"layer_ids": "[2, 1, 6]", name: text}
    save_file({"hidden_states": make_rows(4), "token_ids": torch.arange(4)}, file, metadata=metadata)
    assert main(["convert", str(tmp_path / "files"), "-o", str(tmp_path / "out"), "--from", "vllm"]) == 1
    assert f"{file}: {said}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ("[]", "config.json holds a list where a configuration is an object"),
        ("{", "config.json is no valid JSON"),
        ('{"hidden_size": 8}', "config.json has no 'num_hidden_layers'"),
    ],
)
def test_a_target_that_cannot_be_read_is_one_line(
    config: str, said: str, tmp_path: Path, make_rows: MakeRows, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "files").mkdir()
    save_file({"hidden_states": make_rows(4), "token_ids": torch.arange(4)}, tmp_path / "files" / "a.safetensors")
    (tmp_path / "config.json").write_text(config)
    command = ["convert", str(tmp_path / "files"), "-o", str(tmp_path / "out"), "--from", "vllm", "--layers", "1,2,6"]
    assert main([*command, "--model", str(tmp_path)]) == 1
    assert said in capsys.readouterr().err
    (tmp_path / "config.json").write_text('{"n_layer": 6}')
    assert main([*command, "--model", str(tmp_path)]) == 0
    with Store.open(tmp_path / "out") as store:
        assert store.meta.num_hidden_layers == 6


def test_files_of_two_targets_are_no_store(
    store: Path,
    tmp_path: Path,
    make_meta: MakeMeta,
    make_rows: MakeRows,
    make_record: MakeRecord,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with StoreWriter.open(tmp_path / "other", make_meta(model_fingerprint="beef", model="other-llama")) as writer:
        writer.append(make_rows(1))
        writer.commit([make_record("z", [0])])
    assert main(["convert", str(store), "-o", str(tmp_path / "files"), "--to", "vllm"]) == 0
    assert main(["convert", str(tmp_path / "other"), "-o", str(tmp_path / "more"), "--to", "vllm"]) == 0
    (tmp_path / "more" / "z.safetensors").rename(tmp_path / "files" / "z.safetensors")
    assert main(["convert", str(tmp_path / "files"), "-o", str(tmp_path / "out"), "--from", "vllm"]) == 1
    assert "z.safetensors holds states of other weights (other-llama) than the store's (tiny-llama)" in (
        capsys.readouterr().err
    )
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("layout", ["vllm", "speculators"])
def test_a_store_without_a_complete_record_is_nothing_to_convert(
    layout: str, store_path: Path, meta: StoreMeta, make_rows: MakeRows, make_record: MakeRecord, capsys: Any
) -> None:
    with StoreWriter.open(store_path, meta) as writer:
        writer.append(make_rows(1))
        writer.commit([make_record("a", [0, -1])])
    assert main(["convert", str(store_path), "-o", str(store_path.with_name("out")), "--to", layout]) == 1
    assert f"none of the 1 records of {store_path} is complete: there is nothing to convert" in capsys.readouterr().err
    assert [path.name for path in store_path.parent.iterdir()] == ["store"]


def test_windows_are_counted_and_left_out_for_speculators(
    store: Path,
    tmp_path: Path,
    meta: StoreMeta,
    make_rows: MakeRows,
    make_record: MakeRecord,
    datasets: Any,
    capsys: Any,
) -> None:
    out = tmp_path / "out"
    assert main(["convert", str(store), "-o", str(out), "--to", "speculators"]) == 0
    said = capsys.readouterr().out
    assert "2 records written" in said and "1 incomplete ones left out" in said
    assert "1 records left out that begin after position 0" in said
    assert sorted(path.name for path in (out / "hidden_states").iterdir()) == ["hs_0.safetensors", "hs_1.safetensors"]
    assert len(datasets.load_from_disk(str(out))) == 2
    with StoreWriter.open(tmp_path / "windows", meta) as writer:
        writer.append(make_rows(1))
        writer.commit([make_record("w", [0], first_position=3)])
    assert main(["convert", str(tmp_path / "windows"), "-o", str(tmp_path / "none"), "--to", "speculators"]) == 1
    assert "windows begin after position 0 of their requests" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


def test_a_folder_in_use_is_refused_and_an_error_leaves_nothing(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    used = tmp_path / "used"
    used.mkdir()
    (used / "thesis.tex").touch()
    assert main(["convert", str(store), "-o", str(used), "--to", "vllm"]) == 1
    assert f"{used} is there and not an empty folder" in capsys.readouterr().err

    inside = store / "replica-x"
    assert main(["convert", str(store), "-o", str(inside), "--to", "vllm"]) == 1
    assert f"{inside} would lie within {store}, which it is made from" in capsys.readouterr().err
    assert main(["convert", str(used), "-o", str(used / "store"), "--from", "vllm"]) == 1
    assert f"{used / 'store'} would lie within {used}" in capsys.readouterr().err

    def break_off(items: Iterable[Any], _: int) -> Iterable[Any]:
        yield next(iter(items))
        raise KeyboardInterrupt

    with Store.open(store) as opened, pytest.raises(KeyboardInterrupt):
        write_record_files(opened, tmp_path / "out", "vllm", "residual", break_off)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["store", "used"]


def test_a_store_without_the_last_state_is_nothing_for_speculators(
    tmp_path: Path, make_meta: MakeMeta, capsys: pytest.CaptureFixture[str]
) -> None:
    StoreWriter.open(tmp_path / "store", make_meta(layer_ids=(1, 2))).close()
    assert main(["convert", str(tmp_path / "store"), "-o", str(tmp_path / "out"), "--to", "speculators"]) == 1
    assert "trains on the last state, id 6 of this target, and" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ModuleNotFoundError("No module named 'datasets'"), "pip install datasets"),
        (AttributeError("no PyExtensionType"), "does not import (AttributeError: no PyExtensionType): pip install -U"),
    ],
)
def test_a_library_that_does_not_import_is_one_line(
    error: Exception, said: str, store: Path, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    def fail(name: str) -> None:
        raise error

    monkeypatch.setattr(record_files, "importlib", SimpleNamespace(import_module=fail))
    assert main(["convert", str(store), "-o", str(tmp_path / "out"), "--to", "speculators"]) == 1
    assert said in capsys.readouterr().err.splitlines()[-1]  # behind the progress bar
    assert not (tmp_path / "out").exists()
