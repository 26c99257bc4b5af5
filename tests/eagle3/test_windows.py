"""Records that begin within their request: trained on at the positions that their tokens have there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from tests.eagle3.conftest import HIDDEN, LAYER_IDS, LAYERS, forward, greedy
from vllm_overlay.eagle3.batch import pack
from vllm_overlay.eagle3.data import Corpus, open_corpus
from vllm_overlay.eagle3.selftest import measure_agreement
from vllm_overlay.eagle3.target import load_target
from vllm_overlay.store import PendingRecord, StoreMeta, StoreWriter

PROMPT, LENGTH = 8, 24
# First position and end in the request.
WINDOWS = {"whole": (0, LENGTH), "around": (5, 14), "generated": (11, 20), "last of the prompt": (PROMPT - 1, PROMPT)}


@pytest.fixture(scope="module")
def corpus(reference: LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """One greedy text, whole and in windows of it."""
    path = tmp_path_factory.mktemp("windows") / "store"
    meta = StoreMeta(LAYER_IDS, HIDDEN, "float32", LAYERS, "tiny", "tiny", "0.0.0", "V1")
    token_ids = greedy(reference, torch.arange(3, 3 + PROMPT), LENGTH)
    with StoreWriter.open(path, meta) as writer:
        writer.append(forward(reference, token_ids, LAYER_IDS).contiguous())
        for name, (first, end) in WINDOWS.items():
            prompt, rows = max(0, min(PROMPT, end) - first), np.arange(first, end, dtype=np.int64)
            tokens = token_ids[first:end].numpy()
            writer.commit([PendingRecord(name, tokens, rows, prompt, True, "length", None, None, first_position=first)])
    return open_corpus([path])


def test_a_window_is_learnt_from_where_it_was_generated(corpus: Corpus) -> None:
    """A lone position has no next token, and nothing to learn."""
    assert [entry.key for entry in corpus.entries] == ["whole/", "around/", "generated/"]
    assert corpus.skipped.unmasked == 1
    assert [entry.loss_mask.int().tolist() for entry in corpus.entries] == [
        [0] * 8 + [1] * 16,
        [0] * 3 + [1] * 6,
        [1] * 9,
    ]


def test_the_positions_of_a_window_are_those_in_its_request(corpus: Corpus) -> None:
    entries = corpus.entries
    batch = pack(entries, corpus.read_states(entries), corpus.columns, 2, torch.device("cpu"))
    assert batch.positions.tolist() == [*range(24), *range(5, 14), *range(11, 20)]
    alone = pack(entries[1:2], corpus.read_states(entries[1:2]), corpus.columns, 2, torch.device("cpu"))
    assert alone.positions.tolist() == list(range(5, 14))


def test_the_self_test_holds_for_windows(corpus: Corpus, model_folder: Path) -> None:
    target = load_target(model_folder)
    agreement = measure_agreement(corpus, target, torch.device("cpu"))
    assert (agreement.agreed, agreement.positions) == (16 + 6 + 8, 16 + 6 + 8)


def test_the_digest_tells_where_a_window_begins(corpus: Corpus) -> None:
    moved = [replace(entry, first_position=entry.first_position + 1) for entry in corpus.entries]
    assert Corpus(corpus.stores, corpus.feature_ids, moved, corpus.skipped).digest() != corpus.digest()
