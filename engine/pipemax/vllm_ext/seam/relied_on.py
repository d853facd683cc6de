"""What we rely on of vLLM that vLLM does not promise: methods with their parameters, and attributes.

``METHODS`` and ``ATTRIBUTES`` are what policy pipemax needs, ``TUNABLE_METHODS`` and ``TUNABLE_ATTRIBUTES`` what stock
vLLM needs for limits by formula that change while it runs.

A method is listed if a class of ours overrides it, a patch replaces it, or code of ours calls it although it is
private. Of an overridden method the parameters must be those that ours has, so each line gives them; where versions
differ, ours takes both, and the line gives both.
"""

METHODS: dict[str, str] = {
    "vllm.v1.core.sched.scheduler.Scheduler": """
        __init__(self, vllm_config, kv_cache_config, structured_output_manager, block_size, hash_block_size, \
mm_registry, include_finished_set, log_stats)
        add_request(self, request)
        finish_requests(self, request_ids, finished_status)
        get_request_counts(self)
        make_stats(self, spec_decoding_stats, kv_connector_stats, cudagraph_stats, perf_stats, ec_connector_stats)
        schedule(self, throttle_prefills)
        set_pause_state(self, pause_state)
        update_from_output(self, scheduler_output, model_runner_output)
        _build_kv_connector_meta(self, connector, scheduler_output)
        _free_request(self, request, delay_free_blocks)
        _get_local_prefix_cache_hit(self, request) | (self, request, max_cache_hit_length)
        _handle_blocked_waiting_request(self, request)
        _is_blocked_waiting_status(status)
        _make_cached_request_data(self, running_reqs, resumed_reqs, num_scheduled_tokens, spec_decode_tokens, \
req_to_new_blocks)
        _preempt_request(self, request, timestamp, drop_stale_output)
        _reserve_prefill_lookahead(self, request, num_computed_tokens, num_new_tokens)
        _update_after_schedule(self, scheduler_output)
    """,
    "vllm.v1.core.sched.async_scheduler.AsyncScheduler": """
        _update_after_schedule(self, scheduler_output)
    """,
    "vllm.v1.core.sched.utils": """
        check_sequence_repetition(token_ids, params)
    """,
    "vllm.v1.core.kv_cache_manager.KVCacheManager": """
        allocate_slots(self, request, num_new_tokens, num_new_computed_tokens, new_computed_blocks, \
num_lookahead_tokens, num_external_computed_tokens, delay_cache_blocks, num_encoder_tokens, full_sequence_must_fit, \
reserved_blocks, has_scheduled_reqs, skip_zeroing_group_ids)
        cache_blocks(self, request, num_computed_tokens)
        free(self, request)
        get_computed_blocks(self, request) | (self, request, max_cache_hit_length)
        new_step_starts(self)
        pop_blocks_for_free(self, request)
        prefix_cache_lookup_enabled(self, request)
        remove_skipped_blocks(self, request_id, processed_computed_tokens, num_prompt_tokens)
        truncate_computed_blocks(self, blocks, num_computed_tokens)
    """,
    "vllm.v1.core.block_pool.BlockPool": """
        free_blocks(self, ordered_blocks)
        get_new_blocks(self, num_blocks)
        get_num_free_blocks(self)
        touch(self, blocks)
    """,
    "vllm.v1.core.block_pool.BlockHashToBlockMap": """
        get_one_block(self, key)
    """,
    "vllm.v1.request.Request": """
        append_output_token_ids(self, token_ids)
        update_block_hashes(self)
    """,
    "vllm.v1.engine.core_client.SyncMPClient": """
        call_utility(self, method, *args)
        _send_input(self, request_type, request)
    """,
    "vllm.v1.engine.core.EngineCoreProc": """
        run_engine_core(*args, dp_rank, local_dp_rank, **kwargs)
    """,
    "vllm.v1.executor.multiproc_executor.MultiprocExecutor": """
        _ensure_worker_termination(worker_procs)
        _init_executor(self)
    """,
    "vllm.v1.executor.multiproc_executor.WorkerProc": """
        worker_main(*args, **kwargs)
    """,
    "vllm.v1.metrics.loggers.StatLoggerBase": """
        log_engine_initialized(self)
        record(self, scheduler_stats, iteration_stats, mm_cache_stats, engine_idx)
    """,
    "vllm.distributed.kv_transfer.kv_connector.v1.base.KVConnectorBase_V1": """
        __init__(self, vllm_config, role, kv_cache_config)
        bind_connector_metadata(self, connector_metadata)
        build_connector_meta(self, scheduler_output)
        build_connector_worker_meta(self)
        finish_forward(self)
        get_num_new_matched_tokens(self, request, num_computed_tokens)
        handle_preemptions(self, kv_connector_metadata)
        has_pending_block_frees(self)
        register_kv_caches(self, kv_caches)
        request_finished(self, request, block_ids)
        requires_kv_delivery(self)
        requires_piecewise_for_cudagraph(cls, extra_config)
        save_kv_layer(self, layer_name, kv_layer, attn_metadata, **kwargs)
        shutdown(self)
        start_load_kv(self, forward_context, **kwargs)
        update_state_after_alloc(self, request, blocks, num_external_tokens)
        wait_for_layer_load(self, layer_name)
        wait_for_save(self)
    """,
    "vllm.distributed.kv_transfer.kv_connector.v1.base.SupportsHMA": """
        request_finished_all_groups(self, request, block_ids)
    """,
    "vllm.distributed.kv_transfer.kv_connector.v1.base.KVConnectorWorkerMetadata": """
        aggregate(self, other)
    """,
    "vllm.model_executor.model_loader.base_loader.BaseModelLoader": """
        download_model(self, model_config)
        load_weights(self, model, model_config)
    """,
    "vllm.v1.worker.cpu_worker.CPUWorker": """
        compile_or_warm_up_model(self)
        determine_available_memory(self)
        execute_model(self, scheduler_output)
        get_kv_cache_spec(self)
        init_device(self)
        sample_tokens(self, grammar_output)
    """,
    "vllm.v1.worker.gpu_worker.Worker": """
        compile_or_warm_up_model(self)
        execute_model(self, scheduler_output)
        get_kv_cache_spec(self)
        init_device(self)
        sample_tokens(self, grammar_output)
    """,
    "vllm.v1.worker.gpu_worker.AsyncIntermediateTensors": """
        wait_for_comm(self)
    """,
    "vllm.v1.worker.gpu.model_runner.GPUModelRunner": """
        add_requests(self, scheduler_output)
        execute_model(self, scheduler_output, intermediate_tensors, dummy_run, skip_attn_for_dummy_run, is_profile, \
context_len, valid_dummy_state_slots, randomize_inputs)
        finish_requests(self, scheduler_output)
        profile_run(self, randomize_inputs)
        update_requests(self, scheduler_output)
    """,
    "vllm.v1.worker.gpu.block_table.BlockTables": """
        append_block_ids(self, req_index, new_block_ids, overwrite)
    """,
    "vllm.v1.worker.gpu.states.RequestState": """
        add_request(self, req_id, prompt_len, all_token_ids, num_computed_tokens, max_tokens)
        remove_request(self, req_id)
    """,
    "vllm.v1.attention.backends.cpu_attn.CPUAttentionBackend": """
        supported_kv_cache_layouts(cls)
    """,
    "vllm.v1.attention.backends.mla.cpu_mla.CPUMLAImpl": """
        do_kv_cache_update(self, kv_c_normed, k_pe, kv_cache, slot_mapping, kv_cache_dtype, k_scale) | \
(self, kv_c_normed, k_pe, kv_cache, slot_mapping, kv_cache_dtype, k_scale, skip_scale)
    """,
}
"""Class or module → its methods, a line each: ``name(parameters)``, or ``name(parameters) | (other parameters)``."""

ATTRIBUTES: dict[str, str] = {
    "vllm.config.compilation.CompilationConfig": "static_forward_context",
    "vllm.v1.core.sched.scheduler.Scheduler": """
        _inflight_prefills aux_output_connector current_step deferred_waiting defer_block_free ec_connector
        encoder_cache_manager finished_req_ids hash_block_size kv_holding_waiting max_num_running_reqs
        max_num_scheduled_tokens num_lookahead_tokens num_sampled_tokens_per_step num_spec_tokens observability_config
        pause_state perf_metrics prev_step_scheduled_req_ids reset_preempted_req_ids return_sampling_mask
        scheduler_reserve_full_isl use_pp use_v2_model_runner
    """,
    "vllm.v1.core.block_pool.BlockPool": "cached_block_hash_to_block null_block",
    "vllm.v1.core.kv_cache_utils.KVCacheBlock": "_block_hash",
    "vllm.v1.core.single_type_kv_cache_manager.SingleTypeKVCacheManager": """
        kv_cache_group_id num_cached_block req_to_blocks
    """,
    "vllm.v1.request.Request": """
        _all_token_ids _output_token_ids client_index is_prefill_chunk next_decode_eligible_step num_in_flight_tokens
        num_output_placeholders num_stale_output_tokens prefill_stats structured_output_request
    """,
    "vllm.v1.structured_output.request.StructuredOutputRequest": "_grammar",
    "vllm.v1.engine.core.EngineCore": "batch_queue model_executor scheduler step_fn",
    "vllm.v1.worker.gpu.model_runner.GPUModelRunner": "block_tables max_num_reqs req_states",
    "vllm.v1.worker.gpu.states.RequestState": "all_token_ids draft_tokens num_speculative_steps req_id_to_index",
    "vllm.v1.worker.gpu.buffer_utils.StagedWriteTensor": "_staged_write_contents write_contents",
    # Only written to: without the check, a renamed one would go unnoticed.
    "vllm.v1.worker.gpu_worker.AsyncIntermediateTensors": "_comm_postprocess",
    "vllm.v1.worker.gpu_worker.Worker": "model_runner use_v2_model_runner",
}
"""Class → attributes that its objects have."""

TUNABLE_METHODS: dict[str, str] = {
    "vllm.v1.core.sched.scheduler.Scheduler": """
        get_request_counts(self)
        has_unfinished_requests(self)
        update_from_output(self, scheduler_output, model_runner_output)
    """,
    "vllm.engine.arg_utils.EngineArgs": """
        get_batch_defaults(cls, world_size)
    """,
}
TUNABLE_ATTRIBUTES: dict[str, str] = {
    "vllm.v1.core.sched.scheduler.Scheduler": """
        cache_config max_num_active_reqs max_num_scheduled_tokens need_mamba_block_aligned_split num_spec_tokens
        running scheduler_config
    """,
    "vllm.v1.core.sched.async_scheduler.AsyncScheduler": "max_num_active_reqs max_num_scheduled_tokens",
    "vllm.v1.core.sched.output.SchedulerOutput": """
        num_scheduled_tokens preempted_req_ids scheduled_cached_reqs scheduled_spec_decode_tokens
        total_num_scheduled_tokens
    """,
    "vllm.v1.core.sched.output.CachedRequestData": """
        num_computed_tokens num_output_tokens req_ids resumed_req_ids
    """,
    "vllm.v1.request.Request": "num_output_tokens",
    "vllm.engine.arg_utils.EngineArgs": "cudagraph_capture_sizes",
    "vllm.config.scheduler.SchedulerConfig": "disable_chunked_mm_input enable_chunked_prefill scheduler_cls",
}
