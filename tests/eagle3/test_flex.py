"""Flex attention against plain products with a mask, on the CPU: figures, gradients, and the blocks of its mask."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention import flex_attention
from torch.nn.attention.flex_attention import create_mask

from tests.eagle3.test_draft import make_document, make_draft, make_head, pack_documents
from vllm_overlay.eagle3.batch import Batch, Document
from vllm_overlay.eagle3.draft import Draft
from vllm_overlay.eagle3.flex import BLOCK, make_blocks
from vllm_overlay.eagle3.loss import Objective, TargetHead
from vllm_overlay.eagle3.settings import Settings
from vllm_overlay.eagle3.training import choose_attention, train
from vllm_overlay.errors import OverlayError

CPU = torch.device("cpu")
LENGTHS = (37, 1, 150, 129, 2, 256)  # within a block of 128, and over its edge
WEIGHTS = torch.tensor([0.5, 0.3, 0.2])


@pytest.fixture(autouse=True)
def backward_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flex attention refuses gradients on a CPU, because the kernel that it compiles has none there; what it calls
    uncompiled has them."""
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *tensors: None)


def make_documents(dtype: torch.dtype, lengths: tuple[int, ...] = LENGTHS) -> list[Document]:
    """Answers in the middle, so that not every token is a row."""
    documents = [make_document(n, masked=list(range(n // 3, n - n // 5)), seed=n) for n in lengths]
    return [replace(d, features=d.features.to(dtype), final_states=d.final_states.to(dtype)) for d in documents]


def score(draft: Draft, head: TargetHead, batch: Batch) -> list[torch.Tensor]:
    """The loss, its parts, and every gradient."""
    draft.zero_grad()
    scores = Objective(draft, head, 3).score(batch, WEIGHTS.to(head.head.dtype))
    scores.weighted.backward()
    gradients = [p.grad for p in draft.parameters() if p.grad is not None]
    return [scores.weighted.detach(), scores.cross_entropy, scores.kl, scores.agreed, *gradients]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-11), (torch.float32, 2e-4)])
def test_flex_attention_is_the_mask(dtype: torch.dtype, tolerance: float) -> None:
    """Packed documents of odd lengths, three steps: figures and gradients."""
    draft, documents = make_draft().to(dtype), make_documents(dtype)
    head = TargetHead(torch.ones(32, dtype=dtype), 1e-5, make_head().head.to(dtype))
    masked = score(draft, head, pack_documents(documents, 3, CPU))
    flexed = score(draft, head, pack_documents(documents, 3, CPU, "flex"))
    assert len(masked) == len(flexed) == 4 + len(list(draft.parameters()))
    for one, other in zip(flexed, masked, strict=True):
        scale = float(other.abs().max())
        assert float((one - other).abs().max()) <= tolerance * scale


def require_blocks_of_the_mask(rows: torch.Tensor, lengths: torch.Tensor) -> list[list[int]]:
    """Each block is left out, masked or whole, as the mask of [rows, tokens] says. Returns the whole ones."""
    starts, total = (lengths.cumsum(0) - lengths).tolist(), int(lengths.sum())
    blocks = make_blocks(rows, starts, total, CPU)
    number = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    sees = (number[rows][:, None] == number) & (rows[:, None] >= torch.arange(total))
    assert torch.equal(create_mask(blocks.mask_mod, 1, 1, len(rows), total, device="cpu")[0, 0], sees)

    padded = torch.nn.functional.pad(sees, (0, -total % BLOCK, 0, -len(rows) % BLOCK))
    tiles = padded.view(len(padded) // BLOCK, BLOCK, -1, BLOCK).float().mean((1, 3))
    masked, whole = (
        list_blocks(*found)
        for found in ((blocks.kv_num_blocks, blocks.kv_indices), (blocks.full_kv_num_blocks, blocks.full_kv_indices))
    )
    assert masked == [(tile > 0).logical_and(tile < 1).nonzero()[:, 0].tolist() for tile in tiles]
    assert whole == [(tile == 1).nonzero()[:, 0].tolist() for tile in tiles]
    return whole


def test_the_blocks_are_those_of_the_mask() -> None:
    # The second block of rows begins one token before the end of a block of tokens, which it does not see whole.
    lengths = torch.tensor([37, 1260, 150, 2])
    documents = [make_document(n, masked=list(range(n // 5, n))) for n in lengths.tolist()]
    assert any(require_blocks_of_the_mask(pack_documents(documents, 3, CPU).rows, lengths))
    # A last block of rows that is full sees a block whole too.
    assert require_blocks_of_the_mask(torch.arange(2 * BLOCK), torch.tensor([2 * BLOCK])) == [[], [0]]


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_the_blocks_of_any_rows_are_those_of_the_mask(data: st.DataObject) -> None:
    """Documents of any lengths, of which stretches are rows, or none."""
    lengths = torch.tensor(data.draw(st.lists(st.integers(1, 400), min_size=1, max_size=6)))
    total = int(lengths.sum())
    edges = sorted(data.draw(st.lists(st.integers(0, total), min_size=2, max_size=12)))
    is_row = torch.zeros(total, dtype=torch.bool)
    for start, stop in zip(edges[::2], edges[1::2], strict=False):
        is_row[start:stop] = True
    is_row[data.draw(st.integers(0, total - 1))] = True
    require_blocks_of_the_mask(is_row.nonzero()[:, 0], lengths)


def list_blocks(counts: torch.Tensor, numbers: torch.Tensor) -> list[list[int]]:
    return [row[:count].tolist() for row, count in zip(numbers[0, 0], counts[0, 0].tolist(), strict=True)]


def test_what_a_cpu_cannot_do_is_refused(store_path: Path, model_folder: Path, tmp_path: Path) -> None:
    for change, said in (
        ({"attention": "flex"}, "--attention flex: it has no backward pass on a CPU; use --attention mask"),
        ({"compile": True}, "--compile: it needs a GPU and flex attention; here are cpu and mask"),
    ):
        with pytest.raises(OverlayError, match=said):
            train([store_path], model_folder, tmp_path / "run", Settings(features=(0, 2, 3), **change))
    assert not (tmp_path / "run").exists()


def test_the_choice_of_attention() -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert choose_attention("auto", gpu, 128, "bfloat16") == "flex"
    assert choose_attention("auto", gpu, 128, "float32") == "mask"
    assert choose_attention("auto", cpu, 128, "bfloat16") == "mask"
    assert choose_attention("auto", gpu, 8, "bfloat16") == "mask"
    assert choose_attention("flex", gpu, 64, "float32") == "flex"
    with pytest.raises(OverlayError, match="heads have 16 dimensions or more, the target's have 8"):
        choose_attention("flex", gpu, 8, "bfloat16")
