"""One flat file per behaviour that we change in vLLM, and nothing else.

Every file reads the same: what, why and what it does not change; `build(original)`; `verify()`; `PATCH`. Not allowed
here: swallowed ImportErrors, `hasattr` fall-backs, making attributes (but for names declared in `restores`), version
tests, copied upstream bodies, and imports of vLLM at module level.
"""

if __name__ != "vllm_overlay.patches":
    raise ImportError(f"this folder is the package vllm_overlay.patches, not {__name__!r}: install the project first")

from vllm_overlay.patch import Patch
from vllm_overlay.patches import (
    close_capture_at_exit,
    close_capture_with_engine,
    give_engine_time_to_close,
    install_capture_worker,
    key_compile_cache_by_taps,
    know_overlay_variables,
    leave_out_warm_up_steps,
    note_finished_requests,
    record_steps,
    send_finished_requests,
    tap_decoder_layers,
)

PATCHES: tuple[Patch, ...] = (
    know_overlay_variables.PATCH,
    install_capture_worker.PATCH,
    key_compile_cache_by_taps.PATCH,
    note_finished_requests.PATCH,
    send_finished_requests.PATCH,
    close_capture_with_engine.PATCH,
    close_capture_at_exit.PATCH,
    give_engine_time_to_close.PATCH,
    tap_decoder_layers.PATCH,
    leave_out_warm_up_steps.PATCH,
    record_steps.PATCH,
)
