"""speculators 0.3's worker extension is answered by our capture.

Why: it puts a forward of its own into the model, which calls the layers by Llama's names and refuses models without
vLLM's EAGLE-3 interface, and it strings rows together step by step while its caller cuts them by the prompts' order.
What it does not change: its three methods' names, arguments and returned layout: one tensor for each layer, in
ascending order of the layers whatever order they were asked for in, on the first tensor-parallel rank only. Its layer
ids count from 0 after the layer: its k is our k + 1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import wrapt

from vllm_overlay.activation import ActivationError, current_settings, note_role
from vllm_overlay.patch import Patch

if TYPE_CHECKING:
    from vllm_overlay.capture.memory import MemoryCapture

EXTENSION = "speculators.data_generation.custom_worker:HiddenStatesWorkerExtension"


def build(original: Any) -> Any:
    return wrapt.FunctionWrapper(original, _ANSWERS[original.__name__])


def _set_up(wrapped: Any, worker: Any, args: Any, kwargs: Any) -> None:
    from vllm.distributed import get_tp_group

    from vllm_overlay.capture.memory import attach_memory, detach_memory

    note_role("worker")
    if current_settings().capture is not None:
        raise ActivationError(
            "vllm-overlay: speculators captures into memory and VLLM_OVERLAY_CAPTURE into a store, and a model has one "
            "set of taps: unset VLLM_OVERLAY_CAPTURE"
        )
    layer_ids = kwargs["layer_ids"] if "layer_ids" in kwargs else args[0]
    if vars(worker).get("overlay_memory") is not None:
        detach_memory(worker, worker.overlay_memory)
    worker.overlay_memory = None
    if get_tp_group().rank_in_group == 0:
        worker.overlay_memory = attach_memory(worker, [layer_id + 1 for layer_id in sorted(set(layer_ids))])


def _reset(wrapped: Any, worker: Any, args: Any, kwargs: Any) -> None:
    capture = _find_capture(worker)
    if capture is not None:
        capture.begin()


def _collect(wrapped: Any, worker: Any, args: Any, kwargs: Any) -> Any:
    capture = _find_capture(worker)
    return None if capture is None else capture.collect()


def _find_capture(worker: Any) -> MemoryCapture | None:
    if "overlay_memory" not in vars(worker):
        raise RuntimeError("Must call _setup_hidden_states_capture before capturing states")
    capture: MemoryCapture | None = worker.overlay_memory
    return capture


_ANSWERS = {
    "_setup_hidden_states_capture": _set_up,
    "_reset_capture": _reset,
    "_get_captured_states": _collect,
}


def verify() -> None:
    from speculators.data_generation.custom_worker import HiddenStatesWorkerExtension

    clash = [name for name in dir(HiddenStatesWorkerExtension) if name.startswith("overlay_")]
    if clash:
        raise RuntimeError(f"expected no name of ours in speculators' worker extension, found {', '.join(clash)}")


PATCH = Patch(
    name="capture_for_speculators",
    targets=tuple(f"{EXTENSION}.{name}" for name in _ANSWERS),
    vllm=">=0.11",
    process="any",
    relies_on={f"{EXTENSION}._setup_hidden_states_capture": ("layer_ids",)},
    upstream="speculators 0.4 keeps rows by request; 0.5 takes states from vLLM's own connector",
    remove_when="nobody runs speculators 0.3 any more",
    build=build,
    verify=verify,
    package="speculators==0.3.*",
)
