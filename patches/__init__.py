"""One flat file per behaviour that we change in vLLM, and nothing else.

Every file reads the same: what, why and what it does not change; `build(original)`; `verify()`; `PATCH`. Not allowed
here: swallowed ImportErrors, `hasattr` fall-backs, making attributes (but for names declared in `restores`), version
tests, copied upstream bodies, and imports of vLLM at module level.
"""

if __name__ != "vllm_overlay.patches":
    raise ImportError(f"this folder is the package vllm_overlay.patches, not {__name__!r}: install the project first")

from vllm_overlay.patch import Patch
from vllm_overlay.patches import (
    accept_block_size_of_hasher,
    accept_dropped_request_arguments,
    accept_kv_cache_specs,
    accept_specs_by_layer,
    answer_one_rank_in_a_list,
    answer_to_renamed_model_methods,
    ask_for_grammar_by_step,
    capture_for_speculators,
    close_capture_at_exit,
    close_capture_with_engine,
    compute_whole_prompts,
    configure_cache_as_0_11,
    fill_scheduler_config,
    finish_steps_of_multiproc,
    finish_steps_of_ray,
    finish_steps_of_uniproc,
    give_engine_time_to_close,
    give_scheduler_block_sizes,
    install_capture_worker,
    keep_eos_token_id_of_requests,
    keep_kv_planning_in_utils,
    key_compile_cache_by_taps,
    know_overlay_variables,
    leave_out_warm_up_steps,
    name_torch_for_speculators,
    note_finished_requests,
    record_steps,
    remember_executors,
    send_finished_requests,
    split_steps,
    split_steps_of_multiproc,
    take_constraints_of_sampling_params,
    tap_decoder_layers,
    unpack_finished_requests,
    warm_up_after_initialize,
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
    name_torch_for_speculators.PATCH,
    configure_cache_as_0_11.PATCH,
    answer_one_rank_in_a_list.PATCH,
    compute_whole_prompts.PATCH,
    capture_for_speculators.PATCH,
    # Old programs on a newer vLLM.
    fill_scheduler_config.PATCH,
    accept_kv_cache_specs.PATCH,
    accept_specs_by_layer.PATCH,
    keep_kv_planning_in_utils.PATCH,
    accept_block_size_of_hasher.PATCH,
    remember_executors.PATCH,
    give_scheduler_block_sizes.PATCH,
    accept_dropped_request_arguments.PATCH,
    take_constraints_of_sampling_params.PATCH,
    keep_eos_token_id_of_requests.PATCH,
    unpack_finished_requests.PATCH,
    finish_steps_of_uniproc.PATCH,
    finish_steps_of_multiproc.PATCH,
    finish_steps_of_ray.PATCH,
    split_steps.PATCH,
    split_steps_of_multiproc.PATCH,
    ask_for_grammar_by_step.PATCH,
    warm_up_after_initialize.PATCH,
    answer_to_renamed_model_methods.PATCH,
)
