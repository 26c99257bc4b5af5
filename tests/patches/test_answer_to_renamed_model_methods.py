"""A loaded model's modules answer to both names where they have a method under one."""

from __future__ import annotations

import copy
from typing import Any

import torch

from tests.patches.conftest import ApplyShim
from vllm_overlay.activation import current_ledger
from vllm_overlay.compat.releases import seam_for
from vllm_overlay.patches.answer_to_renamed_model_methods import PATCH


def make_model(name: str, getter: str) -> torch.nn.Module:
    """Inner and outer module with an embedding method of this name, the outer with an EAGLE-3 getter."""

    def embed(self: Any, input_ids: torch.Tensor) -> torch.Tensor:
        embedded: torch.Tensor = self.table(input_ids)
        return embedded

    class Tower(torch.nn.Module):
        def get_input_embeddings(self) -> str:
            return "the tower's own"

        def embed_input_ids(self) -> str:
            return "the tower's other"

    inner = type("Inner", (torch.nn.Module,), {name: embed})()
    inner.table = torch.nn.Embedding(4, 2)
    outer = type("Outer", (torch.nn.Module,), {getter: lambda self: (2, 5)})()
    outer.model, outer.tower, outer.plain = inner, Tower(), torch.nn.Linear(2, 2)
    return outer


def test_both_names(apply_shim: ApplyShim) -> None:
    old_calls = apply_shim(PATCH)
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    renamed = seam_for(current_ledger().release).RENAMED_MODEL_METHODS
    other, name = next((other, name) for other, name in renamed.items() if "input" in other)
    other_getter, getter = next((other, name) for other, name in renamed.items() if "eagle3" in other)
    made = make_model(name, getter)

    class Loader(BaseModelLoader):  # type: ignore[misc]
        def __init__(self) -> None: ...

        def download_model(self, model_config: Any) -> None: ...

        def load_weights(self, model: Any, model_config: Any) -> None: ...

    load = vars(BaseModelLoader)["load_model"]
    # vLLM's own would build a model from a configuration.
    load.__wrapped__, stock = (lambda self: made), load.__wrapped__
    try:
        model: Any = Loader().load_model()
    finally:
        load.__wrapped__ = stock
    ids = torch.tensor([0, 3])
    assert torch.equal(getattr(model.model, other)(ids), getattr(model.model, name)(ids))
    assert getattr(model, other_getter)() == (2, 5)
    assert old_calls() == 2
    assert model.tower.get_input_embeddings() == "the tower's own"
    assert model.tower.embed_input_ids() == "the tower's other"
    assert not hasattr(model.plain, other)
    assert other not in model.state_dict()
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.model.table.weight.zero_()
    assert float(getattr(twin.model, other)(ids).abs().sum()) == 0.0
    assert float(getattr(model.model, other)(ids).abs().sum()) > 0.0
