"""`capture --ray 2` on two CPU replicas, one of which is lost in the middle.

Runs where Ray is installed: it is an extra, and too large for the environments of the checks. What it gave is in
tests/live/results.
"""

from __future__ import annotations

import contextlib
import random
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from tests.live.runs import Reference, clean_environment, run_python
from tests.tiny_models import write_tiny_llama
from vllm_overlay.dataset import DatasetItem, write_dataset
from vllm_overlay.store import Store, StoreError, find_stores, summarize

pytestmark = [
    pytest.mark.live,
    pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed: an extra, too large for the checks"),
]

NUM_ITEMS = 600
VARIABLES = {"OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}


def make_items() -> list[DatasetItem]:
    generator = random.Random(0)
    lengths = [generator.randrange(20, 120) for _ in range(NUM_ITEMS)]
    return [
        DatasetItem(
            f"c{i}",
            np.array([generator.randrange(4, 128) for _ in range(length)], dtype=np.int64),
            np.arange(length) >= length // 2,
        )
        for i, length in enumerate(lengths)
    ]


def lose_a_replica(store: Path, process: subprocess.Popen[bytes], log: Path) -> tuple[Path, int]:
    """Kill the actor of the first store that has a record, with its engine; the store and how many records it had."""
    import psutil

    while process.poll() is None:
        for path in find_stores(store):
            # An index has no tables for a moment after its file is there.
            with contextlib.suppress(StoreError), Store(path) as opened:
                if len(opened):
                    writer = psutil.Process(opened.index.execute("SELECT max(pid) FROM logs")[0][0])
                    actor = next(parent for parent in writer.parents() if "EngineReplica" in " ".join(parent.cmdline()))
                    for each in (actor, *actor.children(recursive=True)):
                        each.kill()
                    return path, len(opened)
        time.sleep(0.01)
    raise AssertionError(log.read_text()[-5000:])


def test_a_lost_replica_is_started_again_and_takes_up_what_is_missing(tmp_path: Path) -> None:
    """CASES 20 with Ray Data: 600 items once each, in the stores of two actors."""
    model = write_tiny_llama(tmp_path / "model", layers=4, spread=0.05)
    items = make_items()
    write_dataset(tmp_path / "data", items, {"model": str(model)})
    store = tmp_path / "store"
    words = ["-m", "vllm_overlay.cli", "capture", str(tmp_path / "data"), "--model", str(model), "-o", str(store)]
    words += [
        "--layers",
        "0,2,4",
        "--ray",
        "2",
        "--",
        "--dtype",
        "float32",
        "--enforce-eager",
        "--max-model-len",
        "256",
    ]
    words += ["--max-num-seqs", "1", "--max-num-batched-tokens", "256"]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, *words], env=clean_environment(VARIABLES), stdout=log, stderr=subprocess.STDOUT
        )
        lost, had = lose_a_replica(store, process, tmp_path / "log")
        assert process.wait(500) == 0, (tmp_path / "log").read_text()[-5000:]
    said = (tmp_path / "log").read_text()
    assert f"{NUM_ITEMS} captured, 0 already there" in said
    texts = {item.key: item for item in items}
    reference = Reference(model)
    with Store.open(store) as opened:
        tags = [record.tag for record in opened if record.complete]
        assert sorted(tags) == sorted(texts)
        assert len(opened.members) == 2
        assert list(opened.verify()) == []
        assert 0 < had < len(Store(lost)), "it was started again, and went on in its own store"
        assert summarize(opened).rows_in_records == sum(len(item.token_ids) for item in items)
        for number in range(0, len(opened), 20):
            record = opened[number]
            item = texts[str(record.tag)]
            assert record.token_ids.tolist() == item.token_ids.tolist()
            assert record.loss_mask is not None and record.loss_mask.tolist() == item.loss_mask.tolist()
            expected = reference.states(record.token_ids)[:, [0, 2, 4]]
            assert float((record.hidden_states - expected).abs().max()) < 1e-4
    again = run_python(words, VARIABLES)
    assert f"0 captured, {NUM_ITEMS} already there" in again.stdout, again.stderr[-3000:]
