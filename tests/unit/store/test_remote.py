"""Stores that are read through fsspec: in its memory, and in local files as if they were elsewhere (local://)."""

from __future__ import annotations

import json
import multiprocessing
import pickle
import sqlite3
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

from tests.unit.store.conftest import MakeMeta, MakeRecord, MakeRows
from vllm_overlay.cli import main
from vllm_overlay.eagle3.data import open_corpus
from vllm_overlay.settings import SettingsError, read_settings
from vllm_overlay.store import Store, StoreError, StoreMeta, StoreWriter, pack_rows

URL = "memory://bucket/store"

Fill = Callable[..., Path]
Upload = Callable[[Path], str]


@pytest.fixture
def fill(tmp_path: Path, make_meta: MakeMeta, make_rows: MakeRows, make_record: MakeRecord) -> Fill:
    """20 rows in shards of 8: a record in two shards with a tag, one with a shared prefix, one that lacks a row."""

    def make(name: str = "store", dtype: str = "bfloat16", seed: int = 0) -> Path:
        rows = make_rows(20, torch.bfloat16, seed)
        with StoreWriter.open(tmp_path / name, make_meta(dtype=dtype), rows_per_shard=8) as writer:
            writer.append(pack_rows(rows) if dtype == "float8_e4m3fn" else rows)
            writer.commit(
                [
                    make_record("a", range(6, 12), tag="x"),
                    make_record("b", [6, 7, 13], first_position=4),
                    make_record("c", [-1, 3]),
                ]
            )
        return tmp_path / name

    return make


@pytest.fixture
def upload() -> Iterator[Upload]:
    """Puts a folder at URL."""
    files = fsspec.filesystem("memory")

    def put(folder: Path) -> str:
        for path in folder.rglob("*"):
            if path.is_file():
                files.pipe_file(f"bucket/store/{path.relative_to(folder)}", path.read_bytes())
        return URL

    yield put
    files.store.clear()
    files.pseudo_dirs[:] = [""]


def describe(store: Store) -> list[tuple[Any, ...]]:
    facts = [(r.request_id, r.token_ids.tolist(), r.complete, r.tag, r.first_position) for r in store]
    states = [record.hidden_states.tolist() if record.complete else None for record in store]
    return list(zip(facts, states, strict=True))


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
def test_a_remote_store_reads_as_it_does_here(dtype: str, fill: Fill, upload: Upload) -> None:
    folder = fill(dtype=dtype)
    with Store.open(folder) as here, Store.open(upload(folder)) as there:
        assert there.meta == here.meta and str(there.path) == URL
        assert describe(there) == describe(here)
        assert torch.equal(there["b"].hidden_states, here["b"].hidden_states)
        assert there.tags() == {"x"} and "c" in there and there.complete_numbers() == [0, 1]
        assert list(there.verify()) == []
        with pytest.raises(StoreError, match=r"'c' of memory://bucket/store is incomplete"):
            _ = there["c"].hidden_states
    with Store.open(f"{URL}/") as again:
        assert len(again) == 3 and again["a"].hidden_states.dtype is torch.bfloat16


def test_only_the_rows_that_are_asked_for_are_fetched(
    fill: Fill, upload: Upload, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, ranges = fsspec.filesystem("memory"), []
    cat_file = type(files).cat_file

    def note(self: Any, path: str, start: int | None = None, end: int | None = None) -> bytes:
        ranges.append((path.rsplit("/", 1)[1], end - start if start is not None and end is not None else None))
        return bytes(cat_file(self, path, start, end))

    with Store.open(upload(fill())) as store:
        monkeypatch.setattr(type(files), "cat_file", note)
        for _ in range(2):
            _ = store["b"].hidden_states
    row = store.meta.row_bytes
    first, second = "0001-00000.safetensors", "0001-00001.safetensors"
    pieces = [(first, 2 * row), (second, row)]
    assert ranges == [(first, 8), pieces[0], (second, 8), pieces[1], *pieces]


def test_replicas_are_read_as_one(tmp_path: Path, fill: Fill, upload: Upload) -> None:
    for number in range(2):
        fill(f"both/replica-{number}", seed=number)
    with Store.open(tmp_path / "both") as here, Store.open(upload(tmp_path / "both")) as there:
        assert len(there) == 6
        assert describe(there) == describe(here)
        assert [str(member.path) for member in there.members] == [f"{URL}/replica-0", f"{URL}/replica-1"]


def test_a_flipped_bit_is_found_and_a_short_file_is_said(fill: Fill, upload: Upload) -> None:
    folder = fill()
    shard = folder / "shards/0001-00001.safetensors"
    content = bytearray(shard.read_bytes())
    content[-3 * 48] ^= 1  # of row 13 of 8..15
    shard.write_bytes(content)
    with Store.open(upload(folder)) as store:
        (found,) = store.verify()
    assert (found.request_id, found.rows[1]) == ("b", "shards/0001-00001.safetensors 5..5")
    shard.write_bytes(content[: -3 * 48])
    with Store.open(upload(folder)) as store:
        assert [damage.request_id for damage in store.verify()] == ["b"]
        assert torch.equal(store["a"].hidden_states, Store.open(folder)["a"].hidden_states)
        with pytest.raises(StoreError, match=r"00001.safetensors is cut short: rows 5..5 are not all there"):
            _ = store["b"].hidden_states


def test_a_store_that_is_being_written_is_refused(
    tmp_path: Path, meta: StoreMeta, make_rows: MakeRows, make_record: MakeRecord, upload: Upload
) -> None:
    with StoreWriter.open(tmp_path / "store", meta) as writer:
        writer.append(make_rows(2))
        writer.commit([make_record("a", range(2))])
        with pytest.raises(StoreError, match=r"store is being written, or its writer died \(index.sqlite-wal is not"):
            Store.open(upload(tmp_path / "store"))
    (tmp_path / "store/index.sqlite-wal").write_bytes(b"")  # what is left where others had it open
    with Store.open(upload(tmp_path / "store")) as store:
        assert len(store) == 1


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("memory://bucket/nothing", r"^memory://bucket/nothing is not a store: it has no index.sqlite"),
        ("nosuch://bucket/store", r"^cannot read nosuch://bucket/store: ValueError: Protocol not known: nosuch$"),
        ("local:///nowhere", r"^local:///nowhere is not a store: it has no index.sqlite"),
    ],
)
def test_what_cannot_be_read_is_one_line(url: str, message: str) -> None:
    with pytest.raises(StoreError, match=message) as caught:
        Store.open(url)
    assert "\n" not in str(caught.value)


def test_without_fsspec_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "fsspec", None)
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    assert main(["inspect", URL]) == 1
    error = "vllm-overlay: error: memory://bucket/store is read through fsspec: pip install 'vllm-overlay[remote]'\n"
    assert capsys.readouterr().err == error


def test_a_newer_schema_is_refused_by_its_url(fill: Fill, upload: Upload) -> None:
    folder = fill()
    connection = sqlite3.connect(folder / "index.sqlite")
    connection.execute("UPDATE meta SET schema_version = 99")
    connection.commit()
    connection.close()
    with pytest.raises(StoreError, match=r"^memory://bucket/store was written in version 99 of the store's schema"):
        Store.open(upload(folder))


def test_the_copy_of_the_index_leaves_nothing(
    fill: Fill, upload: Upload, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, temporary = upload(fill()), tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    with Store.open(url) as store:
        assert list(temporary.iterdir()) == []
        assert len(store) == 3


def test_inspect_reads_it(fill: Fill, upload: Upload, capsys: pytest.CaptureFixture[str]) -> None:
    folder = fill()
    reports = []
    for place in (str(folder), upload(folder)):
        assert main(["inspect", place, "--json", "--verify"]) == 0
        reports.append(json.loads(capsys.readouterr().out))
    here, there = reports
    sizes = [path.stat().st_size for path in folder.rglob("*") if path.is_file()]
    assert (there.pop("store"), there.pop("bytes_on_disk")) == (URL, sum(sizes))
    del here["store"], here["bytes_on_disk"]
    assert there == here


def test_it_is_copied_to_this_machine(fill: Fill, upload: Upload, tmp_path: Path) -> None:
    folder = fill()
    url = upload(folder)
    assert main(["copy", url, "-o", str(tmp_path / "all")]) == 0
    assert main(["copy", url, "-o", str(tmp_path / "some"), "--tag", "x"]) == 0
    with Store.open(folder) as here, Store.open(tmp_path / "all") as every, Store.open(tmp_path / "some") as some:
        assert describe(every) == describe(here)
        assert describe(some) == describe(here)[:1]
        assert list(every.verify()) + list(some.verify()) == []
        assert [path.name for path in sorted((tmp_path / "all/shards").iterdir())] == [
            f"0001-0000{number}.safetensors" for number in range(3)
        ]


def test_it_is_converted_on_this_machine(fill: Fill, upload: Upload, tmp_path: Path) -> None:
    url = upload(fill())
    assert main(["convert", url, "-o", str(tmp_path / "files"), "--to", "vllm"]) == 0
    assert sorted(path.name for path in (tmp_path / "files").glob("*.safetensors")) == [
        "a.safetensors",
        "b.safetensors",
    ]


def test_it_is_trained_on(tmp_path: Path, make_meta: MakeMeta, make_rows: MakeRows, make_record, upload) -> None:
    rows = torch.cat([make_rows(9, seed=0), make_rows(9, seed=1)], dim=1)[:, :4].contiguous()
    with StoreWriter.open(tmp_path / "s", make_meta(layer_ids=(2, 1, 6, 3))) as writer:
        writer.append(rows)
        writer.commit([make_record("a", range(9))])
    corpus = open_corpus([upload(tmp_path / "s")], feature_ids=(2, 3, 1))
    document = corpus.document(corpus.entries[0])
    assert torch.equal(document.features, rows[:, [0, 3, 1]]) and torch.equal(document.final_states, rows[:, 2])


@pytest.mark.parametrize(
    "words",
    [
        ["copy", "{store}", "-o", URL],
        ["convert", "{store}", "-o", URL, "--to", "vllm"],
        ["capture", "{store}", "--model", "m", "-o", URL],
        ["train", "{store}", "--model", "m", "-o", URL],
        ["export", "run", "-o", URL],
        ["prepare", "chats", "--model", "m", "-o", URL],
    ],
)
def test_nothing_is_written_to_a_url(
    words: list[str], fill: Fill, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """pathlib would take it for a folder `memory:` in the current one."""
    store = fill()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="2"):
        main([word.format(store=store) for word in words])
    assert f"{URL} is remote, and read only: name a folder of this machine" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["store"]


def test_files_of_others_and_captures_are_of_this_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", URL, "-o", str(tmp_path / "s"), "--from", "vllm"]) == 1
    assert f"{URL} is remote: files are converted from a folder of this machine" in capsys.readouterr().err
    with pytest.raises(SettingsError, match=r"VLLM_OVERLAY_CAPTURE='s3://a/b' is remote, and a store is written where"):
        read_settings({"VLLM_OVERLAY_CAPTURE": "s3://a/b"})


def test_a_file_url_is_a_folder_of_this_machine(fill: Fill) -> None:
    folder = fill("my store")
    with Store.open(folder.as_uri()) as store:
        assert store.path == folder
        assert store["a"].hidden_states.shape == (6, 3, 8)


def _send_sum(store: Store, results: Any) -> None:
    results.put(float(store[0].hidden_states.double().sum()))


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_it_goes_to_other_processes(fill: Fill, method: str) -> None:
    with Store.open(f"local://{fill()}") as store:
        wanted = float(store[0].hidden_states.double().sum())
        context = multiprocessing.get_context(method)
        results = context.SimpleQueue()
        child = context.Process(target=_send_sum, args=(store, results))
        child.start()
        child.join(60)
        assert child.exitcode == 0 and results.get() == wanted
        assert describe(pickle.loads(pickle.dumps(store))) == describe(store)  # noqa: S301 - what workers are sent
