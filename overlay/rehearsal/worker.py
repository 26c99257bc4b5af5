"""What a rehearsal adds to vLLM's processes, through vLLM's own doors: a loader of random weights, a processor that
takes text only, and an extension of the worker that watches its layers.

vLLM imports this module in every worker, by the name of the extension, before the model is built.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from vllm.config import ModelConfig
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader
from vllm.model_executor.models import ModelRegistry
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.processing import BaseProcessingInfo
from vllm.plugins import load_general_plugins

from vllm_overlay.rehearsal.plan import FOLDER_VARIABLE, MODEL
from vllm_overlay.rehearsal.watch import Watch

EXTENSION = "vllm_overlay.rehearsal.worker.RehearsalExtension"
LOAD_FORMAT = "vllm_overlay_rehearsal"

# vLLM's own dummy weights are up to 1e-3, and every state is then nearly the embedding.
_WIDER = 150


@register_model_loader(LOAD_FORMAT)
class RandomLoader(DummyModelLoader):  # type: ignore[misc]
    """vLLM's dummy weights, large enough that every layer changes the stream."""

    def load_weights(self, model: Any, model_config: ModelConfig) -> None:
        """Fill the model's weights."""
        super().load_weights(model, model_config)
        for tensor in model.state_dict().values():
            if tensor.is_floating_point() and not hasattr(tensor, "dummy_weight_value"):
                tensor.mul_(_WIDER)


class TextOnly(BaseProcessingInfo):  # type: ignore[misc]
    """Takes no images and no sounds.

    The model's own asks for a tokenizer and a processor of images, which a config.json alone does not bring.
    """

    def get_supported_mm_limits(self) -> dict[str, int | None]:
        """No modality."""
        return {}


class RehearsalExtension:
    """Methods of a worker in a rehearsal, called by name with `collective_rpc`."""

    rehearsal_watched: Watch | None = None

    def rehearsal_watch(self) -> str:
        """Watch the layers of the built model from now on, in the rank that captures. Returns the model's class."""
        taps = getattr(self.overlay_session, "taps", None)  # type: ignore[attr-defined]
        if taps is not None:
            self.rehearsal_watched = Watch(self, taps)
        return type(self.get_model()).__name__  # type: ignore[attr-defined]

    def rehearsal_report(self) -> dict[str, list[str]]:
        """What was wrong, and a digest of each row that was in the buffer."""
        watched = self.rehearsal_watched
        return {"faults": watched.faults if watched else [], "rows": sorted(watched.rows) if watched else []}


def take_text_only(model: Path) -> None:
    """Have vLLM serve this model by its text, in this process."""
    load_general_plugins()
    architectures = json.loads(Path(model, "config.json").read_text(encoding="utf-8"))["architectures"]
    known = next((one for one in architectures if one in ModelRegistry.models), None)
    if known is None:
        return
    served = ModelRegistry.models[known].load_model_cls()
    factories = getattr(served, "_processor_factory", None)
    if factories is None:
        return
    text_only = MULTIMODAL_REGISTRY.register_processor(
        factories.processor, info=TextOnly, dummy_inputs=factories.dummy_inputs
    )
    text_only(served)


take_text_only(Path(os.environ[FOLDER_VARIABLE], MODEL))
