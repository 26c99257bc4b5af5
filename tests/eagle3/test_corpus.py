"""The states of a batch, read at once, are those of its records one by one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from vllm_overlay.eagle3.data import Corpus, open_corpus
from vllm_overlay.store import PendingRecord, StoreMeta, StoreWriter, pack_rows

FEATURES = (0, 2, 3)
EXACTLY, WITH_OTHERS = (6, 2, 0, 3), (6, 5, 2, 0, 1, 3)


def write_store(path: Path, layer_ids: tuple[int, ...], dtype: str, seed: int) -> Path:
    """Three records that were decoded beside each other."""
    meta = StoreMeta(layer_ids, 8, dtype, 6, "tiny", "f00d", "0.0.0", "V2")
    rows = torch.randn(15, len(layer_ids), 8, generator=torch.Generator().manual_seed(seed)).to(meta.torch_dtype)
    with StoreWriter.open(path, meta, rows_per_shard=4) as writer:
        writer.append(pack_rows(rows) if meta.is_packed else rows)
        records = [np.arange(number, 15, 3, dtype=np.int64) for number in range(3)]
        tokens = np.arange(5, dtype=np.int64)
        writer.commit(
            [
                PendingRecord(f"{seed}-{i}", tokens, mine, 1, True, "length", None, None)
                for i, mine in enumerate(records)
            ]
        )
    return path


def expect_the_states_of_each(corpus: Corpus, dtype: torch.dtype) -> None:
    entries = [corpus.entries[i] for i in torch.randperm(len(corpus.entries), generator=torch.manual_seed(0)).tolist()]
    states = corpus.read_states(entries)
    assert states.dtype is dtype and states.shape == (5 * len(entries), 4, 8)
    documents = [corpus.document(entry) for entry in entries]
    features = torch.cat([document.features.to(dtype) for document in documents])
    assert torch.equal(states[:, corpus.columns.features], features)
    assert torch.equal(states[:, corpus.columns.final], torch.cat([each.final_states.to(dtype) for each in documents]))


@pytest.mark.parametrize("layer_ids", [EXACTLY, WITH_OTHERS])
def test_of_a_store_with_and_without_other_layers(layer_ids: tuple[int, ...], tmp_path: Path) -> None:
    """Layers that are not trained on are not handed to the device."""
    path = write_store(tmp_path / "a", layer_ids, "bfloat16", seed=1)
    corpus = open_corpus([path], FEATURES)
    expect_the_states_of_each(corpus, torch.bfloat16)
    [entry] = corpus.entries[:1]
    by_id = {layer: corpus.stores[0][0].hidden_states[:, column] for column, layer in enumerate(layer_ids)}
    states = corpus.read_states([entry])
    assert torch.equal(states[:, corpus.columns.features], torch.stack([by_id[layer] for layer in FEATURES], 1))
    assert torch.equal(states[:, corpus.columns.final], by_id[6])


@pytest.mark.parametrize(
    ("dtypes", "wanted"),
    [
        (("float32", "bfloat16"), torch.float32),
        (("bfloat16", "float8_e4m3fn"), torch.bfloat16),
        (("bfloat16", "float16"), torch.float32),
    ],
)
def test_of_stores_of_several_dtypes(dtypes: tuple[str, str], wanted: torch.dtype, tmp_path: Path) -> None:
    paths = [write_store(tmp_path / dtype, EXACTLY, dtype, seed) for seed, dtype in enumerate(dtypes)]
    corpus = open_corpus(paths, FEATURES)
    expect_the_states_of_each(corpus, wanted)
    assert corpus.read_states(corpus.entries[:2]).dtype is wanted  # of the first store alone
