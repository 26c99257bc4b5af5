"""The tapped layers are part of vLLM's compile-cache key.

Why: the cache key covers vLLM's configuration and the model's source, and the taps are in neither. An entry made
without taps would be reused and nothing captured; one made for other layers would write the wrong columns. What it
does not change: the key of an engine without capture.
"""

from __future__ import annotations

import hashlib
import inspect
import sys
from typing import Any

import wrapt

from vllm_overlay.activation import current_settings
from vllm_overlay.patch import Patch


def build(original: Any) -> Any:
    from vllm_overlay.capture.taps import TAP_FORMAT

    inspect.signature(original).bind(object())  # callers pass no argument

    def add_taps(wrapped: Any, config: Any, args: Any, kwargs: Any) -> str:
        key = f"{wrapped(*args, **kwargs)} taps {TAP_FORMAT} {current_settings().layers}"
        return hashlib.sha256(key.encode()).hexdigest()[:10]

    return wrapt.FunctionWrapper(original, add_taps)


def verify() -> None:
    # The class's module moved in 0.11.1 and its package is half imported now, so look at every copy that is loaded.
    loaded = [module for name, module in list(sys.modules.items()) if name.startswith("vllm.config")]
    stock = [module.__name__ for module in loaded if _is_stock(vars(module).get("VllmConfig"))]
    if stock:
        raise RuntimeError(f"expected one VllmConfig with our compute_hash, found another in {', '.join(stock)}")


def _is_stock(config_class: Any) -> bool:
    # Some modules name it `object`, for a type checker that is not there.
    method = vars(config_class).get("compute_hash") if isinstance(config_class, type) else None
    return method is not None and not isinstance(method, wrapt.FunctionWrapper)


PATCH = Patch(
    name="key_compile_cache_by_taps",
    targets=("{VLLM_CONFIG}:VllmConfig.compute_hash",),
    vllm=">=0.11",
    process="worker",
    relies_on={},
    upstream="none: vLLM has no hook for what a plug-in adds to a model",
    remove_when="vLLM asks plug-ins for cache-key factors",
    build=build,
    verify=verify,
    only_with_capture=True,
)
