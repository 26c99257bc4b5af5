"""Models answer to the names that their embedding methods and EAGLE-3 getter have in other release lines.

Why: `get_input_embeddings` became `embed_input_ids` and `get_multimodal_embeddings` `embed_multimodal` in 0.11.1, in
every model and inner model at once, which have no base class but torch's; the getter got `default` into its name in
0.18, and a name more in `SupportsEagle3` would shut models out of it, for it is a protocol that is checked by its
names. So each module of a loaded model with a method under this release's name alone gets the other name. What it
does not change: classes, modules with a method of the other name, such as vision towers, and models of loaders with a
way of their own (tensorizer, gguf, ModelExpress).
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import wrapt

from vllm_overlay.activation import count_old_call, current_ledger
from vllm_overlay.compat.releases import seam_for
from vllm_overlay.patch import Patch


def build(original: Any) -> Any:
    def load(wrapped: Any, loader: Any, args: Any, kwargs: Any) -> Any:
        model = wrapped(*args, **kwargs)
        renamed = seam_for(current_ledger().release).RENAMED_MODEL_METHODS
        for module in model.modules():
            for other, name in renamed.items():
                add_name(module, other, name)
        return model

    return wrapt.FunctionWrapper(original, load)


def add_name(module: Any, other: str, name: str) -> None:
    if callable(getattr(type(module), name, None)) and getattr(type(module), other, None) is None:
        # Bound anew by a deep copy, as a plain function would not be.
        vars(module)[other] = MethodType(call_under(name), module)


def call_under(name: str) -> Any:
    import torch

    def call(module: Any, *args: Any, **kwargs: Any) -> Any:
        # A compiled forward calls no Python of ours.
        if not torch.compiler.is_compiling():
            count_old_call(PATCH.name)
        return getattr(module, name)(*args, **kwargs)

    return call


def verify() -> None:
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    if "load_model" in vars(DummyModelLoader):
        raise RuntimeError("expected loaders to inherit BaseModelLoader.load_model, found DummyModelLoader.load_model")


PATCH = Patch(
    name="answer_to_renamed_model_methods",
    targets=("{MODEL_LOADER}:BaseModelLoader.load_model",),
    vllm=">=0.11",
    process="worker",
    relies_on={},
    upstream="none: vLLM promises nothing of its internals",
    remove_when="never: old programs stay as they are",
    build=build,
    verify=verify,
    old_form="model.get_input_embeddings(...), .get_multimodal_embeddings(...), .get_eagle3_aux_hidden_state_layers()",
)
