"""`vllm-overlay inspect`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
import torch

from vllm_overlay.cli import inspect
from vllm_overlay.errors import OverlayError
from vllm_overlay.store import StoreWriter


def run(*words: object) -> int:
    parser = argparse.ArgumentParser()
    inspect.add_arguments(parser)
    return inspect.run(parser.parse_args([str(word) for word in words]))


@pytest.fixture
def small(store_path, meta, make_record) -> Path:
    """Six rows; row r has norm r + 1 in the first column, 10 times as much in the second, 100 times in the third."""
    rows = torch.zeros(6, 3, 8)
    for column, factor in enumerate((1.0, 10.0, 100.0)):
        rows[:, column, column] = factor * torch.arange(1, 7)
    with StoreWriter.open(store_path, meta) as writer:
        writer.append(rows)
        writer.commit(
            [
                make_record("a", range(4), num_prompt_tokens=3, finish_reason="stop"),
                make_record("b", [0, 1, 4], num_prompt_tokens=2, first_position=9),
                make_record("c", [-1, 1, 1], num_prompt_tokens=2),
            ]
        )
    return store_path


def test_json_has_the_facts_of_the_store(small: Path, capsys) -> None:
    assert run(small, "--json", "--verify") == 0
    report = json.loads(capsys.readouterr().out)
    norms = report.pop("norms")
    size = report.pop("bytes_on_disk")
    assert size == sum(path.stat().st_blocks * 512 for path in small.rglob("*") if path.is_file()) > 0
    assert report == {
        "store": str(small),
        "layer_ids": [2, 1, 6],
        "hidden_size": 8,
        "dtype": "float32",
        "num_hidden_layers": 6,
        "model": "tiny-llama",
        "model_fingerprint": "f00d",
        "vllm_version": "0.32.0",
        "runner": "V2",
        "records": 3,
        "complete": 2,
        "incomplete": 1,
        "windows": 1,
        "prompt_tokens": 7,
        "generated_tokens": 3,
        "rows_stored": 6,
        "rows_in_records": 5,
        "row_references": 9,
        "rows_dropped": 0,
        "logs": 1,
        "logs_open": 0,
        "logs_unclean": 0,
        "shards": 1,
        "finish_reasons": {"length": 2, "stop": 1},
        "damaged": [],
    }
    # Records a and b: norms 1, 2, 3, 4 and 1, 2, 5.
    assert (norms["layer_ids"], norms["records"], norms["tokens"]) == ([2, 1, 6], 2, 7)
    assert norms["mean"] == pytest.approx([18 / 7, 180 / 7, 1800 / 7])
    assert norms["median"] == pytest.approx([2, 20, 200])
    assert norms["p5"] == pytest.approx([1, 10, 100])
    assert norms["p95"] == pytest.approx([4.7, 47, 470])
    assert norms["zero_rows"] == norms["non_finite_rows"] == [0, 0, 0]


def test_zero_and_non_finite_states_are_counted(store_path, meta, make_rows, make_record, capsys) -> None:
    """CASES.md 10: all-zero states trained "fine" elsewhere."""
    rows = make_rows(3)
    rows[0, 1] = 0
    rows[1, 2, 3] = float("inf")
    rows[:, 0, 0] = float("nan")
    with StoreWriter.open(store_path, meta) as writer:
        writer.append(rows)
        writer.commit([make_record("a", range(3))])
    assert run(store_path, "--json") == 0
    norms = json.loads(capsys.readouterr().out)["norms"]
    assert norms["zero_rows"] == [0, 1, 0]
    assert norms["non_finite_rows"] == [3, 0, 1]
    assert norms["mean"][0] is None
    assert norms["mean"][2] == pytest.approx(float(rows[[0, 2], 2].norm(dim=-1).mean()), rel=1e-6)


def test_text_and_plot(small: Path, tmp_path: Path, capsys) -> None:
    plot = tmp_path / "norms.png"
    assert run(small, "--plot", plot, "--sample", 1) == 0
    text = capsys.readouterr().out
    assert "3: 2 complete, 1 incomplete, 1 begin after position 0" in text
    assert "6 stored, 5 of them in records, 4 more references to shared rows" in text
    assert "(tokens: 4, records: 1)" in text
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in tmp_path.iterdir() if path.suffix != ""] == ["norms.png"]


def test_damage_is_named_and_the_status_is_1(small: Path, capsys) -> None:
    shard = next((small / "shards").iterdir())
    content = bytearray(shard.read_bytes())
    content[-60] ^= 1  # in row 5, which no record has
    shard.write_bytes(content)
    assert run(small, "--verify") == 0
    content[-60 - 96] ^= 1  # in row 4, which only record b has
    shard.write_bytes(content)
    capsys.readouterr()
    assert run(small, "--json", "--verify") == 1
    output = capsys.readouterr()
    (damage,) = json.loads(output.out)["damaged"]
    assert (damage["index"], damage["request_id"]) == (1, "b")
    assert "record 1 ('b'): checksum" in output.err
    assert "verify: 100%" in output.err


def test_what_cannot_be_done_is_said(small: Path, tmp_path: Path, meta, capsys) -> None:
    with pytest.raises(OverlayError, match=r"cannot write .*absent/norms.png: No such file"):
        run(small, "--plot", tmp_path / "absent" / "norms.png")
    with pytest.raises(OverlayError, match="nothing is not a store"):
        run(tmp_path / "nothing")
    StoreWriter.open(tmp_path / "empty", meta).close()
    with pytest.raises(OverlayError, match="empty has no complete record to plot"):
        run(tmp_path / "empty", "--plot", tmp_path / "norms.png")
    assert run(tmp_path / "empty", "--verify") == 0
    assert "no complete record: no norms by layer" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        run(small, "--sample", 0)
