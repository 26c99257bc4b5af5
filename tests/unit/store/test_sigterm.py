"""A command that is told to end takes away what it has not finished."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.store.conftest import MakeRecord, MakeRows
from vllm_overlay.cli import convert, copy, main
from vllm_overlay.store import StoreMeta, StoreWriter


@pytest.fixture
def ended() -> Iterator[list[int]]:
    """Signals that reach this process, as they would end one that has no handler."""
    found: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: found.append(number))
    yield found
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("words", [["copy"], ["convert", "--to", "vllm"], ["convert", "--from", "vllm"]])
def test_sigterm_leaves_nothing_unfinished(
    words: list[str],
    tmp_path: Path,
    meta: StoreMeta,
    make_rows: MakeRows,
    make_record: MakeRecord,
    ended: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = tmp_path / "source"
    with StoreWriter.open(source, meta, rows_per_shard=1) as writer:
        writer.append(make_rows(2))
        writer.commit([make_record("a", [0]), make_record("b", [1])])
    if "--from" in words:
        source = tmp_path / "files"
        assert main(["convert", str(tmp_path / "source"), "-o", str(source), "--to", "vllm"]) == 0
    before = sorted(path.name for path in tmp_path.iterdir())
    during = []

    def end_after_one(items: Iterable[Any], _: int) -> Iterator[Any]:
        yield next(iter(items))
        during.extend(path.name for path in tmp_path.iterdir() if path.name.startswith(".new-"))
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(copy, "_show_progress", end_after_one)
    monkeypatch.setattr(convert, "show_progress", end_after_one)
    with pytest.raises(SystemExit) as exit_:
        main([words[0], str(source), "-o", str(tmp_path / "new"), *words[1:]])
    assert exit_.value.code == 143 and len(during) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    os.kill(os.getpid(), signal.SIGTERM)
    assert ended == [signal.SIGTERM]  # afterwards it is the caller's again
