"""What the `capture` command works out before an engine starts."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from vllm_overlay.dataset import DatasetItem, write_dataset
from vllm_overlay.errors import OverlayError
from vllm_overlay.fingerprint import fingerprint_model
from vllm_overlay.offline import capture
from vllm_overlay.offline.capture import (
    CaptureSummary,
    capture_dataset,
    find_done,
    find_readable,
    find_spans,
    take_group,
)
from vllm_overlay.offline.ray_replicas import count_gpus, find_refusal
from vllm_overlay.offline.replica import ALONE, Replica, share_out
from vllm_overlay.store import PendingRecord, StoreMeta, StoreWriter


def write_model(folder: Path, hidden: int = 2880, layers: int = 24) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"hidden_size": hidden, "num_hidden_layers": layers}))
    return folder


def make_item(key: str, length: int) -> DatasetItem:
    return DatasetItem(key, np.arange(length, dtype=np.int64), np.ones(length, dtype=np.bool_))


@pytest.mark.parametrize(("dtype", "needed"), [("auto", r"5760 bytes need 94\.4"), ("fp8", r"2884 bytes need 47\.3")])
def test_too_small_a_disk_is_refused_before_the_model_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, needed: str
) -> None:
    """CASES 18: 1,000 prompts x 4,096 tokens x 4 layers x 2,880 x 2 bytes, with 40 GB free."""
    monkeypatch.setenv("VLLM_OVERLAY_DTYPE", dtype)
    monkeypatch.setattr(capture.shutil, "disk_usage", lambda folder: SimpleNamespace(free=40 * 10**9))
    items = [make_item(f"i{i}", 4096) for i in range(1000)]
    write_dataset(tmp_path / "data", items, {})
    model = write_model(tmp_path / "model")
    with pytest.raises(OverlayError, match=rf"{needed} GB in .*, which has 40\.0 GB free"):
        capture_dataset(
            tmp_path / "data", model=str(model), store=tmp_path / "store", layers="eagle3", engine_options=[]
        )
    assert not (tmp_path / "store").exists()


def make_store(tmp_path: Path, model: Path, tokens: int = 2, name: str = "store", key: str = "i0") -> Path:
    """A store with one record of the key."""
    meta = StoreMeta((1,), 4, "float32", 2, "toy", fingerprint_model(str(model), {}), "0.16.0", "V1")
    import torch

    with StoreWriter.open(tmp_path / name, meta) as writer:
        writer.append(torch.ones(tokens, 1, 4))
        count = np.arange(tokens)
        writer.commit([PendingRecord("r", count, count, tokens, True, "length", key, None)])
    return tmp_path / name


def test_nothing_left_to_do_starts_no_engine(tmp_path: Path) -> None:
    """CASES 20: everything is there already; the options would be refused by any engine."""
    model = write_model(tmp_path / "model", hidden=4, layers=2)
    store = make_store(tmp_path, model)
    write_dataset(tmp_path / "data", [make_item("i0", 2)], {})
    summary = capture_dataset(
        tmp_path / "data", model=str(model), store=store, layers="1", engine_options=["--no-such-option"]
    )
    assert (summary.captured, summary.already_there, summary.num_tokens) == (0, 1, 0)


def test_a_store_of_rows_in_another_dtype_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the model loads: replicas write stores of their own, and would be read as one only later."""
    model = write_model(tmp_path / "model", hidden=4, layers=2)
    make_store(tmp_path, model, name="store/replica-0-of-3-0123abcd")
    write_dataset(tmp_path / "data", [make_item("i0", 2)], {})
    monkeypatch.setenv("VLLM_OVERLAY_DTYPE", "fp8")
    with pytest.raises(OverlayError, match=r"holds rows in float32, and VLLM_OVERLAY_DTYPE is fp8: .* set it to auto"):
        capture_as(tmp_path, ALONE)


def test_a_record_of_other_tokens_is_not_the_item(tmp_path: Path) -> None:
    """An interrupted engine leaves the first rows of an aborted request under the item's key."""
    store = make_store(tmp_path, write_model(tmp_path / "model", hidden=4, layers=2), tokens=2)
    assert find_done([store], [make_item("i0", 2), make_item("other", 2)]) == {"i0"}
    assert find_done([store], [make_item("i0", 3)]) == set()


def capture_as(tmp_path: Path, replica: Replica, options: tuple[str, ...] = ("--no-such-option",)) -> CaptureSummary:
    """The command on `data`, `model` and `store`; an engine would refuse the options."""
    return capture_dataset(
        tmp_path / "data",
        model=str(tmp_path / "model"),
        store=tmp_path / "store",
        layers="1",
        engine_options=options,
        replica=replica,
    )


def test_a_replica_takes_up_what_is_missing_of_its_own_share(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Records of an earlier run, alone or with another number, count whoever owns them now."""
    model = write_model(tmp_path / "model", hidden=4, layers=2)
    items = [make_item(f"i{i}", 2) for i in range(8)]
    write_dataset(tmp_path / "data", items, {})
    plan = share_out(items, 2)
    mine, theirs = ([item.key for item in plan.take(items, index)] for index in (0, 1))
    make_store(tmp_path, model, key=mine[0])
    make_store(tmp_path, model, name="store/replica-2-of-3-0123abcd", key=mine[1])
    make_store(tmp_path, model, name=f"store/replica-0-of-2-{plan.digest}", key=mine[2])
    asked: list[tuple[list[str], Path]] = []

    def note(wanted: list[DatasetItem], there: int, model: str, folder: Path, *others: object) -> CaptureSummary:
        asked.append(([item.key for item in wanted], folder))
        return CaptureSummary(len(wanted), there, 0, 0, 0.0)

    monkeypatch.setattr(capture, "_run", note)
    monkeypatch.setattr(capture, "switch_on", lambda *arguments: None)
    summary = capture_as(tmp_path, Replica(0, 2, "RANK=0 and WORLD_SIZE=2"))
    assert asked == [([mine[3]], tmp_path / "store" / f"replica-0-of-2-{plan.digest}")]
    assert (summary.captured, summary.already_there) == (1, 3)
    said = capsys.readouterr().out
    assert "replica 0/2 (RANK=0 and WORLD_SIZE=2): 4 of 8 items, 1 of them missing; writes " in said
    # The other one has begun nothing, and alone there is all to do but what any store has.
    capture_as(tmp_path, Replica(1, 2, "--replica 1/2"))
    assert asked[1] == (theirs, tmp_path / "store" / f"replica-1-of-2-{plan.digest}")
    capture_as(tmp_path, ALONE)
    assert sorted(asked[2][0]) == sorted([mine[3], *theirs])
    assert asked[2][1].name == f"replica-0-of-1-{share_out(items, 1).digest}"


def test_a_replica_does_not_open_what_another_machine_may_be_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_model(tmp_path / "model", hidden=4, layers=2)
    items = [make_item(f"i{i}", 2) for i in range(2)]
    write_dataset(tmp_path / "data", items, {})
    plan = share_out(items, 2)
    own = make_store(tmp_path, model, name=f"store/replica-0-of-2-{plan.digest}", key=plan.take(items, 0)[0].key)
    (tmp_path / "store" / f"replica-1-of-2-{plan.digest}").mkdir()
    (tmp_path / "store" / f"replica-1-of-2-{plan.digest}" / "index.sqlite").write_text("in the middle of a write")
    assert find_readable(tmp_path / "store", own, plan) == [own]
    assert capture_as(tmp_path, Replica(0, 2, "--replica 0/2")).already_there == 1


def test_replicas_that_have_not_begun_need_the_disk_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CASES 18, when they all start at once."""
    monkeypatch.setattr(capture.shutil, "disk_usage", lambda folder: SimpleNamespace(free=50 * 10**9))
    items = [make_item(f"i{i}", 4096) for i in range(1000)]
    write_dataset(tmp_path / "data", items, {})
    model = write_model(tmp_path / "model")
    with pytest.raises(OverlayError, match=r"4096000 tokens .* need 94\.4 GB in .*, which has 50\.0 GB free"):
        capture_dataset(
            tmp_path / "data",
            model=str(model),
            store=tmp_path / "store",
            layers="eagle3",
            engine_options=[],
            replica=Replica(1, 2, "--replica 1/2"),
        )


def test_what_earlier_runs_hold_needs_no_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Begun by two replicas and nearly done, then started again as four that have no folders yet."""
    items = [make_item(f"i{i}", 2) for i in range(8)]
    write_dataset(tmp_path / "data", items, {})
    model = write_model(tmp_path / "model", hidden=4, layers=2)
    plan = share_out(items, 4)
    missing = [next(item.key for item in plan.take(items, index)) for index in (0, 1, 2)]
    for item in items:
        if item.key not in missing:
            make_store(tmp_path, model, name="store/replica-0-of-2-0123abcd", key=item.key)
    (tmp_path / "store" / f"replica-2-of-4-{plan.digest}").mkdir()
    checked: list[list[str]] = []
    monkeypatch.setattr(capture, "_run", lambda *arguments: CaptureSummary(0, 0, 0, 0, 0.0))
    monkeypatch.setattr(capture, "switch_on", lambda *arguments: None)
    monkeypatch.setattr(capture, "check_disk", lambda store, items, *others: checked.append([i.key for i in items]))
    capture_as(tmp_path, Replica(0, 4, "--replica 0/4"))
    # Replica 2 has begun, and replica 3 has nothing left to do.
    assert checked == [missing[:2]]


def test_ranks_of_one_engine_are_no_replicas(tmp_path: Path) -> None:
    for options in (("--distributed-executor-backend", "external_launcher"), ("-dp=external_launcher",)):
        with pytest.raises(OverlayError, match=r"RANK=0 and WORLD_SIZE=2: with external_launcher .* one engine"):
            capture_as(tmp_path, Replica(0, 2, "RANK=0 and WORLD_SIZE=2"), options)


@pytest.mark.parametrize(
    ("replica", "options", "left"),
    [
        (ALONE, (), set()),  # torchrun --nproc-per-node 1
        (Replica(0, 1, "--replica 0/1"), (), set()),
        (Replica(0, 2, "RANK=0 and WORLD_SIZE=2"), (), set()),
        (ALONE, ("--distributed-executor-backend", "external_launcher"), {"RANK", "TORCHELASTIC_USE_AGENT_STORE"}),
    ],
)
def test_an_engine_of_its_own_does_not_wait_for_torchruns_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, replica: Replica, options: tuple[str, ...], left: set[str]
) -> None:
    launcher = {"RANK": "0", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    for name, value in launcher.items():
        monkeypatch.setenv(name, value)
    write_model(tmp_path / "model", hidden=4, layers=2)
    write_dataset(tmp_path / "data", [make_item(f"i{i}", 2) for i in range(8)], {})
    seen: list[set[str]] = []

    def note(*arguments: object) -> CaptureSummary:
        seen.append(launcher.keys() & os.environ.keys())
        return CaptureSummary(0, 0, 0, 0, 0.0)

    monkeypatch.setattr(capture, "_run", note)
    monkeypatch.setattr(capture, "switch_on", lambda *arguments: None)
    capture_as(tmp_path, replica, options)
    assert seen == [left]


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


def test_what_a_replica_of_ray_refuses_is_one_line() -> None:
    traceback = 'ray::MapWorker()\n  File "x.py", line 1, in f\n{}\nray.exceptions.UserCodeException: UDF failed'
    ours = traceback.format("vllm_overlay.errors.OverlayError: 3 of 9 items are longer than the engine takes")
    assert find_refusal(ours) == "3 of 9 items are longer than the engine takes"
    assert find_refusal(traceback.format("ValueError: vllm_overlay.errors.OverlayError: no")) is None


def test_a_cluster_with_too_few_gpus_is_one_line() -> None:
    assert count_gpus([], 4, {"CPU": 16.0}) == 0
    with pytest.raises(OverlayError, match=r"--ray 4: replicas of 2 GPUs each need 8, and the cluster has 7"):
        count_gpus(["--tensor-parallel-size", "2"], 4, {"GPU": 7.0})
