"""How often the step is compiled for batches of different sizes. The kernels are a GPU's: here only torch's tracing."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.version import Version

from tests.eagle3.test_draft import make_document, make_draft, make_head, pack_documents
from vllm_overlay.eagle3.batch import make_chunks
from vllm_overlay.eagle3.epochs import Epochs
from vllm_overlay.eagle3.initialisation import create_draft, draft_config
from vllm_overlay.eagle3.loss import Objective
from vllm_overlay.eagle3.ranks import alone
from vllm_overlay.eagle3.settings import Settings
from vllm_overlay.eagle3.target import load_target
from vllm_overlay.eagle3.trainer import Trainer, compile_options
from vllm_overlay.eagle3.vocabulary import choose_vocabulary, count_tokens

CPU = torch.device("cpu")
# Documents of each batch: other numbers of them, of rows, of chunks; tokens that fill their blocks of 128, or do not;
# at last three chunks of 64 targets and one target more.
BATCHES = ((300, 250, 180), (160, 96), (256, 128, 128, 128), (109, 124))


def test_tracing_does_not_depend_on_the_size_of_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """What inductor asks on a GPU is not in it: see compile_options."""
    monkeypatch.setattr("vllm_overlay.eagle3.batch.make_chunks", partial(make_chunks, targets_per_chunk=64))
    torch.compiler.reset()
    graphs: list[int] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        graphs.append(len(inputs))
        return graph

    objective = Objective(make_draft(), make_head(), 2, partial(torch.compile, dynamic=True, backend=backend))
    counts = []
    for lengths in BATCHES:
        documents = [make_document(n, masked=list(range(20, n)), seed=n) for n in lengths]
        with torch.no_grad():  # flex attention refuses gradients on a CPU
            objective.score(pack_documents(documents, 2, CPU, "flex"), torch.tensor([0.6, 0.4]))
        counts.append(len(graphs))
    torch.compiler.reset()
    assert counts == [3] * len(BATCHES)  # the draft, the target's head, the loss


def test_a_run_tells_torch_not_to_ask_for_the_rows(
    store_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = compile_options()
    torch.compile(lambda x: x, options=options)  # raises where torch does not know one
    knows = Version(torch.__version__).release >= (2, 11)
    assert options == ({"triton.mix_order_reduction_non_strict_mode": True} if knows else {})

    told: list[dict[str, Any]] = []
    monkeypatch.setattr(torch, "compile", lambda function, **how: told.append(how))
    settings = Settings(features=(0, 2, 3), draft_vocab_size=48, dtype="float32", holdout=0.0, compile=True)
    source, target = Epochs.open([store_path], settings), load_target(model_folder)
    tokens = ((entry.token_ids, entry.loss_mask) for entry in source.training)
    vocabulary = choose_vocabulary(*count_tokens(tokens, target.config.vocab_size), 48)
    draft = create_draft(draft_config(target.config, (0, 2, 3), 48), target, vocabulary, "target", 0)
    Trainer(draft, target, vocabulary, source, settings, alone("cpu"))
    source.close()
    assert told == [{"dynamic": True, "options": options}] * 3
