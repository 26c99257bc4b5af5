"""Where vLLM computes something else than transformers on purpose or by mistake: what it is, and the change to
transformers' model that makes it compute the same. A cause is right if the states are equal with the change.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Cause:
    """`said` is what vLLM does; `change` makes a model of transformers do it."""

    said: str
    change: Callable[[Any], None]


def _widen_windows(model: Any) -> None:
    configs = {id(module.config): module.config for module in model.modules() if hasattr(module, "config")}
    for config in configs.values():
        if getattr(config, "sliding_window", None):
            config.sliding_window += 1


def _use_exact_gelu(model: Any) -> None:
    from torch.nn.functional import gelu

    for module in _find(model, "BloomGelu"):
        module.forward = gelu


def _round_activations(model: Any) -> None:
    for module in _find(model, "XIELUActivation"):
        module.bfloat16()


def _leave_out_bias(model: Any) -> None:
    for name, parameter in model.named_parameters():
        if name.endswith("e_score_correction_bias"):
            parameter.data.zero_()


def _look_back_only(model: Any) -> None:
    """Without a mask of the whole's, the text model makes its own."""
    for module in _find(model, "PaliGemmaModel"):
        module._update_causal_mask = lambda *_: None


def _find(model: Any, class_name: str) -> list[Any]:
    return [module for module in model.modules() if type(module).__name__ == class_name]


_WIDER_WINDOW = Cause("a token of vLLM's sees one more back than the window", _widen_windows)

CAUSES: Mapping[str, Cause] = {
    "ApertusForCausalLM": Cause("vLLM has the activation's parameters in bfloat16", _round_activations),
    "BloomForCausalLM": Cause("vLLM has the exact GELU for the one by tanh", _use_exact_gelu),
    "Cohere2ForCausalLM": _WIDER_WINDOW,
    "Cohere2MoeForCausalLM": _WIDER_WINDOW,
    "Cohere2VisionForConditionalGeneration": _WIDER_WINDOW,
    "Ernie4_5_MoeForCausalLM": Cause("vLLM's router on a CPU leaves out the correction bias", _leave_out_bias),
    "PaliGemmaForConditionalGeneration": Cause("a token of vLLM's sees no later one of the prompt", _look_back_only),
}
