"""The names of vLLM whose look is recorded for every release.

A patch for one of these is checked against all releases without a network. Targets of patches that exist are recorded
whether they are listed here or not. Where something moved, the old place and the new one are both listed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from vllm_overlay.compat import releases
from vllm_overlay.patch import Patch
from vllm_overlay.source.fit import list_needed_names, list_targets, name_owner

_BY_MODULE: Mapping[str, str] = {
    # Scheduler and its calls
    "vllm.v1.core.sched.scheduler": """
        Scheduler Scheduler.__init__ Scheduler.schedule Scheduler.update_from_output Scheduler.get_grammar_bitmask
        Scheduler.add_request Scheduler.finish_requests Scheduler._free_request Scheduler._free_blocks
        Scheduler.shutdown
        """,
    "vllm.v1.core.sched.async_scheduler": """
        AsyncScheduler AsyncScheduler.__init__ AsyncScheduler.schedule AsyncScheduler.finish_requests
        """,
    "vllm.v1.core.sched.interface": """
        SchedulerInterface SchedulerInterface.__init__ SchedulerInterface.schedule SchedulerInterface.finish_requests
        SchedulerInterface.get_grammar_bitmask
        """,
    "vllm.v1.core.sched.output": """
        SchedulerOutput SchedulerOutput.make_empty CachedRequestData CachedRequestData.make_empty NewRequestData
        NewRequestData.from_request GrammarOutput
        """,
    "vllm.v1.outputs": """
        ModelRunnerOutput AsyncModelRunnerOutput AsyncModelRunnerOutput.get_output SamplerOutput
        """,
    "vllm.v1.request": """
        Request Request.__init__ Request.from_engine_core_request Request.num_tokens Request.get_finished_reason
        Request.is_finished Request.append_output_token_ids Request.eos_token_id Request.use_structured_output
        RequestStatus RequestStatus.is_finished RequestStatus.get_finished_reason
        """,
    "vllm.v1.structured_output": "StructuredOutputManager StructuredOutputManager.__init__",
    "vllm.v1.structured_output.request": """
        StructuredOutputRequest StructuredOutputRequest.from_sampling_params
        """,
    "vllm.v1.engine": "EngineCoreRequest",
    # KV-cache planning
    "vllm.v1.core.kv_cache_utils": """
        get_kv_cache_configs get_kv_cache_config get_kv_cache_groups get_global_kv_cache_groups
        get_kv_cache_config_from_groups generate_scheduler_kv_cache_config unify_hybrid_kv_cache_specs
        unify_kv_cache_configs _get_kv_cache_groups_uniform_spec _get_kv_cache_groups_uniform_type
        _get_kv_cache_groups_uniform_page_size get_request_block_hasher resolve_kv_cache_block_sizes init_none_hash
        check_enough_kv_cache_memory may_override_num_blocks get_num_blocks get_uniform_page_size
        """,
    "vllm.v1.core.kv_cache_planning": """
        get_kv_cache_configs get_kv_cache_groups get_global_kv_cache_groups get_kv_cache_config_from_groups
        generate_scheduler_kv_cache_config unify_hybrid_kv_cache_specs _get_kv_cache_groups_uniform_spec
        _get_kv_cache_groups_uniform_type _get_kv_cache_groups_uniform_page_size get_uniform_page_size
        may_override_num_blocks check_enough_kv_cache_memory
        """,
    "vllm.v1.core.kv_cache_config_builder": """
        KVCacheConfigBuilder KVCacheConfigBuilder.get_kv_cache_groups
        KVCacheConfigBuilder.get_kv_cache_config_from_groups get_kv_cache_config_builder
        """,
    "vllm.v1.kv_cache_interface": """
        KVCacheConfig KVCacheGroupSpec KVCacheTensor KVCacheSpec AttentionSpec FullAttentionSpec UniformTypeKVCacheSpecs
        """,
    # Engine, executors and workers
    "vllm.v1.engine.core": """
        EngineCore EngineCore.__init__ EngineCore._initialize_kv_caches EngineCore.step EngineCore.step_with_batch_queue
        EngineCore.add_request EngineCore.preprocess_add_request EngineCore.abort_requests EngineCore.shutdown
        EngineCoreProc EngineCoreProc.__init__ EngineCoreProc.run_engine_core DPEngineCoreProc
        get_kv_cache_configs generate_scheduler_kv_cache_config get_request_block_hasher
        """,
    "vllm.v1.engine.utils": "CoreEngineProcManager CoreEngineProcManager.close CoreEngineProcManager.shutdown",
    "vllm.v1.executor.abstract": """
        Executor Executor.__init__ Executor.get_class Executor.execute_model Executor.sample_tokens
        Executor.collective_rpc Executor.initialize_from_config Executor.compile_or_warm_up_model
        Executor.determine_available_memory Executor.get_kv_cache_specs Executor.set_kv_cache_layout
        Executor.max_concurrent_batches Executor.shutdown UniProcExecutor
        """,
    "vllm.v1.executor.uniproc_executor": """
        UniProcExecutor UniProcExecutor.execute_model UniProcExecutor.sample_tokens UniProcExecutor.collective_rpc
        UniProcExecutor._init_executor ExecutorWithExternalLauncher
        """,
    "vllm.v1.executor.multiproc_executor": """
        MultiprocExecutor MultiprocExecutor.__init__ MultiprocExecutor.execute_model MultiprocExecutor.sample_tokens
        MultiprocExecutor.collective_rpc MultiprocExecutor._init_executor MultiprocExecutor.shutdown
        WorkerProc.__init__ WorkerProc.worker_main WorkerProc.worker_busy_loop
        """,
    "vllm.v1.executor.ray_executor": """
        RayDistributedExecutor RayDistributedExecutor.execute_model RayDistributedExecutor.sample_tokens
        """,
    "vllm.v1.executor.ray_executor_v2": """
        RayExecutorV2 RayExecutorV2.execute_model RayExecutorV2.sample_tokens RayExecutorV2.collective_rpc
        """,
    "vllm.v1.executor.ray_distributed_executor": """
        RayDistributedExecutor RayDistributedExecutor.execute_model RayDistributedExecutor.sample_tokens
        """,
    "vllm.executor.executor_base": """
        ExecutorBase ExecutorBase.__init__ ExecutorBase.collective_rpc ExecutorBase.execute_model
        """,
    "vllm.executor.uniproc_executor": "UniProcExecutor UniProcExecutor.collective_rpc",
    "vllm.worker.worker_base": """
        WorkerBase WorkerWrapperBase WorkerWrapperBase.__init__ WorkerWrapperBase.init_worker
        WorkerWrapperBase.execute_method
        """,
    "vllm.v1.worker.worker_base": """
        WorkerBase WorkerBase.__init__ WorkerWrapperBase WorkerWrapperBase.__init__ WorkerWrapperBase.init_worker
        WorkerWrapperBase.execute_method WorkerWrapperBase.execute_model
        """,
    "vllm.v1.worker.gpu_worker": """
        Worker Worker.__init__ Worker.init_device Worker.load_model Worker.get_model Worker.execute_model
        Worker.sample_tokens Worker.compile_or_warm_up_model Worker.initialize_from_config
        Worker.determine_available_memory Worker.get_kv_cache_spec Worker.shutdown
        """,
    "vllm.v1.worker.cpu_worker": """
        CPUWorker CPUWorker.execute_model CPUWorker.sample_tokens CPUWorker.load_model
        CPUWorker.compile_or_warm_up_model
        """,
    "vllm.v1.worker.gpu_model_runner": """
        GPUModelRunner GPUModelRunner.__init__ GPUModelRunner.load_model GPUModelRunner.execute_model
        GPUModelRunner.sample_tokens GPUModelRunner._model_forward GPUModelRunner.initialize_kv_cache
        """,
    "vllm.v1.worker.cpu_model_runner": "CPUModelRunner CPUModelRunner.execute_model CPUModelRunner.load_model",
    "vllm.v1.worker.gpu.model_runner": """
        GPUModelRunner GPUModelRunner.load_model GPUModelRunner.execute_model GPUModelRunner.sample_tokens
        """,
    "vllm.v1.worker.gpu.input_batch": "InputBatch",
    # Configuration: of the large classes only the fields that moved or that something here uses
    "vllm.config": """
        VllmConfig.compute_hash VllmConfig.__post_init__ SchedulerConfig ParallelConfig.__post_init__
        CacheConfig.block_size ModelConfig.max_model_len KVTransferConfig
        """,
    "vllm.config.vllm": """
        VllmConfig.__post_init__ VllmConfig.compute_hash VllmConfig.model_config VllmConfig.cache_config
        VllmConfig.parallel_config VllmConfig.scheduler_config VllmConfig.speculative_config
        VllmConfig.kv_transfer_config VllmConfig.additional_config
        """,
    "vllm.config.scheduler": """
        SchedulerConfig SchedulerConfig.__post_init__ SchedulerConfig.get_scheduler_cls SchedulerConfig.default_factory
        """,
    "vllm.config.parallel": """
        ParallelConfig.__post_init__ ParallelConfig.worker_extension_cls ParallelConfig.worker_cls
        """,
    "vllm.config.cache": """
        CacheConfig.block_size CacheConfig.hash_block_size CacheConfig.num_gpu_blocks CacheConfig.swap_space
        CacheConfig.cpu_offload_gb CacheConfig.gpu_memory_utilization CacheConfig.calculate_kv_scales
        CacheConfig.enable_prefix_caching CacheConfig.prefix_caching_hash_algo
        """,
    "vllm.config.model": "ModelConfig.max_model_len ModelConfig.seed ModelConfig.task",
    "vllm.config.kv_transfer": "KVTransferConfig",
    "vllm.envs": "environment_variables compile_factors compute_hash __getattr__",
    "vllm.plugins": "load_general_plugins load_plugins_by_group",
    "vllm.forward_context": "ForwardContext",
    # Models
    "vllm.model_executor.models.interfaces": """
        SupportsMultiModal SupportsMultiModal.get_input_embeddings SupportsMultiModal.embed_input_ids
        SupportsMultiModal.get_multimodal_embeddings SupportsMultiModal.embed_multimodal
        SupportsEagleBase SupportsEagle3 SupportsEagle3.set_aux_hidden_state_layers
        SupportsEagle3.get_eagle3_aux_hidden_state_layers SupportsEagle3.get_eagle3_default_aux_hidden_state_layers
        EagleModelMixin EagleModelMixin._set_aux_hidden_state_layers supports_eagle3
        """,
    "vllm.model_executor.models.interfaces_base": """
        VllmModel VllmModel.get_input_embeddings VllmModel.embed_input_ids is_vllm_model
        _check_vllm_model_embed_input_ids _check_vllm_model_get_input_embeddings
        """,
    "vllm.model_executor.models.llama": """
        LlamaModel.get_input_embeddings LlamaModel.embed_input_ids LlamaForCausalLM.get_input_embeddings
        LlamaForCausalLM.embed_input_ids LlamaForCausalLM.get_eagle3_aux_hidden_state_layers
        LlamaForCausalLM.get_eagle3_default_aux_hidden_state_layers LlamaForCausalLM.set_aux_hidden_state_layers
        """,
}

WATCHED: tuple[str, ...] = tuple(f"{module}:{name}" for module, names in _BY_MODULE.items() for name in names.split())


def list_watched_names(patches: Sequence[Patch]) -> list[str]:
    """Every name whose look is recorded: the listed ones and what the patches need, as every seam has it."""
    names = set(WATCHED)
    for patch in patches:
        names |= set(list_needed_names(patch))
        targets = [
            target for release in [*releases.RELEASES, *releases.READ] for target in list_targets(patch, release)
        ]
        names |= {str(target) for target in targets} | {name_owner(target) for target in targets if target.restore}
    return sorted(names)
