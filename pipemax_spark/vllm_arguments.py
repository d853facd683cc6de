"""List the arguments under ``vllm:`` in an engine config that do not decide a row's answer.

All others belong to the spec.

The list holds arguments that change only speed, memory or logging. An argument that is missing here, or new in a later
vLLM, therefore costs a refusal that says why, not a table of mixed answers. "Only" leaves room for rounding: other
batches, other parallelism or compiled kernels may round differently, as a new vLLM does. An argument that changes the
precision of a computation counts, and so does a choice of kernels that may quantize activations (``moe_backend``,
``linear_backend``).
"""

import json
from collections.abc import Mapping
from typing import Any

_PARALLELISM = {
    "pipeline_parallel_size",
    "tensor_parallel_size",
    "prefill_context_parallel_size",
    "decode_context_parallel_size",
    "dcp_comm_backend",
    "dcp_q_replicate",
    "dcp_kv_cache_interleave_size",
    "cp_kv_cache_interleave_size",
    "data_parallel_size",
    "data_parallel_rank",
    "data_parallel_start_rank",
    "data_parallel_size_local",
    "data_parallel_address",
    "data_parallel_rpc_port",
    "data_parallel_hybrid_lb",
    "data_parallel_external_lb",
    "data_parallel_multi_port_external_lb",
    "data_parallel_backend",
    "dp_sync_interval",
    "disable_nccl_for_dp_synchronization",
    "enable_expert_parallel",
    "enable_ep_weight_filter",
    "enable_eplb",
    "eplb_config",
    "expert_placement_strategy",
    "enable_elastic_ep",
    "elastic_ep_max_dp_size",
    "enable_hc_sp",
    "distributed_executor_backend",
    "distributed_timeout_seconds",
    "cpu_distributed_timeout_seconds",
    "master_addr",
    "master_port",
    "nnodes",
    "node_rank",
    "device_ids",
    "numa_bind",
    "numa_bind_nodes",
    "numa_bind_cpus",
    "disable_custom_all_reduce",
    "enable_shm_tensor_arena",
}
_MEMORY = {
    "gpu_memory_utilization",
    "kv_cache_memory_bytes",
    "num_gpu_blocks_override",
    "block_size",
    "mamba_block_size",
    "enable_prefix_caching",
    "prefix_caching_hash_algo",
    "prefix_cache_retention_interval",
    "prefix_match_unit",
    "mamba_cache_mode",
    "disable_hybrid_kv_cache_manager",
    "offload_backend",
    "cpu_offload_gb",
    "cpu_offload_params",
    "offload_group_size",
    "offload_num_in_group",
    "offload_prefetch_step",
    "offload_params",
    "kv_offloading_size",
    "kv_offloading_backend",
    "kv_transfer_config",
    "kv_events_config",
    "enable_sleep_mode",
    "sleep_mode_offload_cudagraph",
    "sleep_preserve_parameter_names",
    "enable_cumem_allocator",
    "enable_nccl_comm_suspend",
    # This decides which rows are refused as too long, not how the others are answered. The config's own field does not
    # count either.
    "max_model_len",
    # Prompts are text here: these only set the size of what other kinds of input would take.
    "limit_mm_per_prompt",
    "skip_mm_profiling",
    "mm_processor_cache_gb",
    "mm_processor_cache_type",
    "mm_shm_cache_max_object_size_mb",
    "mm_ipc_gpu_memory_gb",
}
_SCHEDULE = {
    "max_num_seqs",
    "max_num_active_seqs",
    "max_num_queued_reqs",
    "max_num_queued_tokens",
    "max_num_batched_tokens",
    "max_num_scheduled_tokens",
    "long_prefill_token_threshold",
    "long_prefill_token_threshold_adaptive",
    "enable_chunked_prefill",
    "disable_chunked_mm_input",
    "scheduler_reserve_full_isl",
    "prefill_schedule_interval",
    "watermark",
    "scheduling_policy",
    "async_scheduling",
    "stream_interval",
    "enable_dbo",
    "ubatch_size",
    "dbo_decode_token_threshold",
    "dbo_prefill_token_threshold",
    "renderer_num_workers",
}
_COMPILATION = {
    "enforce_eager",
    "compilation_config",
    "optimization_level",
    "performance_mode",
    "cudagraph_capture_sizes",
    "max_cudagraph_capture_size",
    "enable_flashinfer_autotune",
    "attention_backend",
    "disable_cascade_attn",
}
_LOADING = {
    "download_dir",
    "safetensors_load_strategy",
    "safetensors_prefetch_num_threads",
    "safetensors_prefetch_block_size",
    "max_parallel_loading_workers",
    "pt_load_map_location",
    "use_tqdm_on_load",
}
_LOGGING = {
    "served_model_name",
    "disable_log_stats",
    "aggregate_engine_logging",
    "logging_config",
    "log_level",
    "log_config_file",
    "show_hidden_metrics_for_version",
    "otlp_traces_endpoint",
    "collect_detailed_traces",
    "per_request_spec_decode_metrics",
    "kv_cache_metrics",
    "kv_cache_metrics_sample",
    "custom_histogram_buckets",
    "cudagraph_metrics",
    "enable_layerwise_nvtx_tracing",
    "enable_mfu_metrics",
    "enable_logging_iteration_details",
    "enable_mm_processor_stats",
    "jit_monitor_mode",
    "jit_monitor_verbose",
    "profiler_config",
    "ray_workers_use_nsight",
}
_LIFETIME = {
    "fault_tolerance_config",
    "enable_fault_tolerance",
    "shutdown_timeout",
    "fail_on_environ_validation",
}
WITHOUT_EFFECT_ON_ANSWERS = frozenset(
    _PARALLELISM | _MEMORY | _SCHEDULE | _COMPILATION | _LOADING | _LOGGING | _LIFETIME
)
"""Names of ``EngineArgs`` in vLLM 0.32."""


def arguments_that_count(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that may change answers, as plain JSON with sorted keys at every depth."""
    counted = {name: value for name, value in arguments.items() if name not in WITHOUT_EFFECT_ON_ANSWERS}
    in_order: dict[str, Any] = json.loads(json.dumps(counted, sort_keys=True))
    return in_order
