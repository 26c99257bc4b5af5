"""Rows in 8 bits: the error is e4m3's and no other, and whatever reads a store reads such a one."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from tests.unit.store.conftest import MakeMeta, MakeRecord, MakeRows
from vllm_overlay.cli import main
from vllm_overlay.eagle3.data import open_corpus
from vllm_overlay.store import Part, Store, StoreError, StoreMeta, StoreWriter, pack_rows, summarize
from vllm_overlay.store.float8 import make_scratch, pack_into, unpack_rows

# All finite numbers of e4m3, as torch's own conversion has them.
NUMBERS = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
NUMBERS = NUMBERS[NUMBERS.isfinite()]

# Below 2**127, of any size and of sizes that a row has together.
LARGE = float(np.nextafter(np.float32(2.0**127), np.float32(0)))
ANY = st.floats(-LARGE, LARGE, width=32)
ROWS = st.one_of(
    st.lists(ANY, min_size=1, max_size=9),
    st.builds(
        lambda size, values: [float(np.float32(value * 2.0**size)) for value in values],
        st.integers(-140, 126),
        st.lists(st.floats(-1, 1, width=32), min_size=1, max_size=9),
    ),
)


@given(ROWS)
def test_the_error_is_that_of_the_nearest_number(row: list[float]) -> None:
    """And thus within the bound that float8.py states; nothing is lost to the scale or to bfloat16."""
    rows = torch.tensor([[row]])
    packed = pack_rows(rows)
    scale = float(packed[0, 0, -4:].clone().view(torch.float32))
    found, wanted = unpack_rows(packed)[0, 0].double(), rows[0, 0].double()
    peak = float(wanted.abs().max())
    assert np.frexp(scale)[0] == 0.5
    assert peak / 448 <= scale <= max(peak / 224, 2.0**-116)
    error = (found - wanted).abs()
    assert bool((error <= torch.clamp(wanted.abs() / 16, min=scale / 1024)).all())
    nearest = (NUMBERS[:, None] * scale - wanted).abs().amin(dim=0)
    assert torch.equal(error, nearest)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_each_layer_has_a_scale_of_its_own(dtype: torch.dtype, make_rows: MakeRows) -> None:
    """Of layers whose norms are 10,000 times apart none drowns."""
    rows = (make_rows(50) * torch.tensor([1e-2, 1.0, 1e2])[:, None]).to(dtype)
    error = (unpack_rows(pack_rows(rows)).float() - rows.float()).norm(dim=(0, 2)) / rows.float().norm(dim=(0, 2))
    assert bool(((error > 0.01) & (error < 0.04)).all()), error


def test_more_rows_than_are_converted_at_a_time(make_rows: MakeRows) -> None:
    rows = make_rows(10)
    packed = torch.empty((10, 3, 12), dtype=torch.uint8)
    scratch = make_scratch(3, 8, 4 * 3 * 8 * 4, torch.device("cpu"))
    assert len(scratch) == 4
    pack_into(packed, rows, rows.abs().amax(-1), scratch)
    assert torch.equal(packed, pack_rows(rows))
    assert torch.equal(unpack_rows(packed), torch.cat([unpack_rows(row[None]) for row in packed]))


def test_what_is_no_number_stays_none_and_zero_stays_zero() -> None:
    rows = torch.tensor([[[1.0, float("inf")]], [[float("nan"), 2.0]], [[float("-inf"), 0.0]], [[0.0, 0.0]]])
    found = unpack_rows(pack_rows(rows))
    assert bool(found[:3].isnan().all())
    assert found[3].tolist() == [[0.0, 0.0]]


@pytest.fixture
def float8(make_meta: MakeMeta) -> StoreMeta:
    return make_meta(dtype="float8_e4m3fn")


@pytest.fixture
def rows(make_rows: MakeRows) -> torch.Tensor:
    return pack_rows(make_rows(20))


@pytest.fixture
def store(store_path: Path, float8: StoreMeta, rows: torch.Tensor, make_record: MakeRecord) -> Path:
    """20 rows in shards of 8: a record in two shards, one with a shared prefix and a gap, an incomplete one, a whole
    shard."""
    with StoreWriter.open(store_path, float8, rows_per_shard=8) as writer:
        assert writer.append(rows) == 0
        assert torch.equal(writer.read_rows(6, 4), rows[6:10])
        writer.commit(
            [
                make_record("a", range(6, 12), tag="x"),
                make_record("b", [6, 7, 13]),
                make_record("c", [-1, 3]),
                make_record("d", range(8), tag="x"),
            ]
        )
    return store_path


def test_a_store_says_what_it_holds_and_gives_bfloat16(store: Path, rows: torch.Tensor, float8: StoreMeta) -> None:
    wanted = unpack_rows(rows)
    with Store.open(store) as opened:
        assert opened.meta == float8
        assert opened["a"].hidden_states.dtype is torch.bfloat16
        assert torch.equal(opened["a"].hidden_states, wanted[6:12])
        assert torch.equal(opened["b"].hidden_states, wanted[[6, 7, 13]])
        assert torch.equal(opened["d"].hidden_states, wanted[:8])
        with pytest.raises(StoreError, match="positions 0 of 0-1 have no hidden states"):
            _ = opened["c"].hidden_states
        assert list(opened.verify()) == []


def test_a_row_takes_a_byte_a_number_and_four_for_each_layer(store: Path, float8: StoreMeta) -> None:
    assert float8.row_bytes == 3 * (8 + 4)
    shards = sorted(store.glob("shards/*"))
    assert [load_file(path)["packed_hidden_states"].shape for path in shards] == [(8, 3, 12), (8, 3, 12), (4, 3, 12)]


def test_a_flipped_bit_of_a_scale_is_found(store: Path) -> None:
    shard = store / "shards" / "0001-00001.safetensors"
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1  # of row 15, which is in no record
    content[-36 * 2 - 1] ^= 1  # of row 13
    shard.write_bytes(content)
    with Store.open(store) as opened:
        assert [damage.request_id for damage in opened.verify()] == ["b"]


def test_stages_write_their_layers_in_float8(
    store_path: Path, float8: StoreMeta, rows: torch.Tensor, make_record: MakeRecord
) -> None:
    with ExitStack() as writers:
        for index, columns in enumerate([(1,), (0, 2)]):
            part = Part("s", index, 2, columns)
            writer = writers.enter_context(StoreWriter.open(store_path, float8, part=part))
            writer.append(rows[:5, list(columns)].contiguous())
            writer.commit([make_record("a", range(5))])
    with Store.open(store_path) as opened:
        assert torch.equal(opened["a"].hidden_states, unpack_rows(rows[:5]))
        assert list(opened.verify()) == []


def test_copies_hold_the_same_bytes(store: Path, tmp_path: Path) -> None:
    for name, words in {"all": [], "some": ["--tag", "x", "--records", "0:1"]}.items():
        assert main(["copy", str(store), "-o", str(tmp_path / name), *words]) == 0
    assert (tmp_path / "all/shards/0001-00000.safetensors").samefile(store / "shards/0001-00000.safetensors")
    with Store.open(store) as source, Store.open(tmp_path / "all") as every, Store.open(tmp_path / "some") as some:
        assert every.meta == some.meta == source.meta
        assert [record.request_id for record in some] == ["a"]
        for name in ("a", "b", "d"):
            assert torch.equal(every[name].hidden_states, source[name].hidden_states)
        assert torch.equal(some["a"].hidden_states, source["a"].hidden_states)
        assert list(every.verify()) + list(some.verify()) == []


def test_files_of_others_get_bfloat16(store: Path, tmp_path: Path, float8: StoreMeta) -> None:
    assert main(["convert", str(store), "-o", str(tmp_path / "files"), "--to", "vllm"]) == 0
    assert main(["convert", str(tmp_path / "files"), "-o", str(tmp_path / "back"), "--from", "vllm"]) == 0
    with Store.open(store) as source, Store.open(tmp_path / "back") as back:
        assert back.meta.dtype == "bfloat16"
        for name in ("a", "b", "d"):
            states = source[name].hidden_states
            written = load_file(tmp_path / "files" / f"{name}.safetensors")["hidden_states"]
            assert written.dtype is torch.bfloat16
            assert torch.equal(written, states) and torch.equal(back[name].hidden_states, states)


def test_inspect_reports_it(store: Path, rows: torch.Tensor, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(store), "--json", "--verify"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["dtype"] == "float8_e4m3fn" and report["damaged"] == []
    sampled = unpack_rows(rows)[[*range(6, 12), 6, 7, 13, *range(8)]].double()
    assert report["norms"]["mean"] == pytest.approx(sampled.norm(dim=-1).mean(dim=0).tolist())
    assert main(["inspect", str(store)]) == 0
    assert "2, 1, 6 (float8_e4m3fn)" in capsys.readouterr().out


def test_the_files_are_as_large_as_inspect_says(tmp_path: Path, make_meta: MakeMeta, make_record: MakeRecord) -> None:
    """Of wide rows, half of bfloat16's bytes and a four thousandth more."""
    states = torch.randn(64, 3, 4096).bfloat16()
    sizes = {}
    for dtype, rows in {"bfloat16": states, "float8_e4m3fn": pack_rows(states)}.items():
        with StoreWriter.open(tmp_path / dtype, make_meta(dtype=dtype, hidden_size=4096)) as writer:
            writer.append(rows)
            writer.commit([make_record("a", range(64))])
        with Store.open(tmp_path / dtype) as opened:
            index = sum(path.stat().st_blocks * 512 for path in (tmp_path / dtype).iterdir() if path.is_file())
            sizes[dtype] = summarize(opened).bytes_on_disk - index
    assert sizes["float8_e4m3fn"] / sizes["bfloat16"] == pytest.approx(0.5 * 4100 / 4096, rel=0.01)


def test_the_trainer_reads_it(
    tmp_path: Path, make_meta: MakeMeta, make_record: MakeRecord, make_rows: MakeRows
) -> None:
    rows = pack_rows(make_rows(9).repeat(1, 2, 1)[:, :4].contiguous())
    with StoreWriter.open(tmp_path / "s", make_meta(dtype="float8_e4m3fn", layer_ids=(2, 1, 6, 3))) as writer:
        writer.append(rows)
        writer.commit([make_record("a", range(9))])
    corpus = open_corpus([tmp_path / "s"], feature_ids=(2, 3, 1))
    document = corpus.document(corpus.entries[0])
    assert torch.equal(document.features, unpack_rows(rows)[:, [0, 3, 1]])
    assert torch.equal(document.final_states, unpack_rows(rows)[:, 2])


def test_dtypes_are_not_mixed(store: Path, tmp_path: Path, make_meta: MakeMeta, capsys) -> None:
    plain = make_meta(dtype="bfloat16")
    with pytest.raises(StoreError, match=r"\(dtype: expected bfloat16, found float8_e4m3fn\): use another folder"):
        StoreWriter.open(store, plain)
    StoreWriter.open(tmp_path / "plain", plain).close()
    assert main(["copy", str(store), str(tmp_path / "plain"), "-o", str(tmp_path / "both")]) == 1
    assert "holds other rows than" in capsys.readouterr().err
    assert not (tmp_path / "both").exists()
    StoreWriter.open(store / "replica-0", plain).close()
    with pytest.raises(StoreError, match="dtype: expected float8_e4m3fn, found bfloat16"):
        Store.open(store)


def test_rows_that_are_not_packed_are_refused(store_path: Path, float8: StoreMeta, make_rows: MakeRows) -> None:
    with StoreWriter.open(store_path, float8) as writer:
        with pytest.raises(StoreError, match=r"\[n, 3, 12\] of torch.uint8, as pack_rows makes them, not \[2, 3, 8\]"):
            writer.append(make_rows(2, torch.bfloat16))
        assert writer.num_rows == 0
