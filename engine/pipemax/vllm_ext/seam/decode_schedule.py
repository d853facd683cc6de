"""Schedule a step of decodes only, as vLLM's ``schedule`` would, in a fifth of its time.

vLLM's loop is made for chunks, drafts, encoders and preemptions: some 5 µs for each running request. A decode step of
PipeMax has none of these, and the plan has left room for every block. What vLLM calls once in a step is called here
too; what it calls for each request is written out for a decode. A test compares what both return and leave behind.
"""

from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput
from vllm.v1.request import Request

from pipemax.vllm_ext.seam.planned_scheduler import PlannedScheduler

_BlockIds = tuple[list[int], ...]
"""Ids of blocks, a list for each group of layers."""


def can_schedule_decodes(scheduler: PlannedScheduler) -> bool:
    """Return whether vLLM is set up with nothing that ``schedule_decodes`` leaves out."""
    return (
        scheduler.use_v2_model_runner
        and scheduler.num_spec_tokens == scheduler.num_lookahead_tokens == 0
        and scheduler.num_sampled_tokens_per_step == 1
        and scheduler.ec_connector is None
        and scheduler.aux_output_connector is None
        and not scheduler.observability_config.enable_logging_iteration_details
    )


def schedule_decodes(scheduler: PlannedScheduler) -> SchedulerOutput | None:
    """Schedule one token of each running request; None, with nothing changed, if vLLM has to do it.

    That is if anything waits, or a request needs another number of tokens or has to wait for an earlier step. As in
    vLLM's ``schedule``, a request without a block, and those behind it, do not run.
    """
    running = scheduler.running
    if scheduler.waiting or scheduler.pause_state != PauseState.UNPAUSED:
        return None
    step = scheduler.current_step + 1
    for request in running:
        num_tokens = len(request._all_token_ids) + request.num_output_placeholders
        if num_tokens - request.num_computed_tokens != 1 or step < request.next_decode_eligible_step:
            return None
    scheduler.current_step = step
    if hasattr(scheduler, "num_executed_steps"):  # since vLLM 0.33
        scheduler.num_executed_steps += 1
    scheduler.kv_cache_manager.new_step_starts()
    scheduled, new_blocks = _allocate(scheduler, running)
    num_scheduled_tokens = {request.request_id: 1 for request in scheduled}
    assert len(num_scheduled_tokens) <= scheduler.max_num_scheduled_tokens
    output = SchedulerOutput(
        scheduled_new_reqs=[],
        scheduled_cached_reqs=_cached_requests(scheduler, scheduled, num_scheduled_tokens, new_blocks),
        num_scheduled_tokens=num_scheduled_tokens,
        total_num_scheduled_tokens=len(num_scheduled_tokens),
        scheduled_spec_decode_tokens={},
        scheduled_encoder_inputs={},
        preempted_req_ids=scheduler.reset_preempted_req_ids,
        finished_req_ids=scheduler.finished_req_ids,
        free_encoder_mm_hashes=scheduler.encoder_cache_manager.get_freed_mm_hashes(),
        ec_manager_metadata=scheduler.encoder_cache_manager.get_manager_metadata(),
    )
    assert scheduler.connector is not None
    output.kv_connector_metadata = scheduler._build_kv_connector_meta(scheduler.connector, output)
    _update_after_decodes(scheduler, scheduled, output)
    return output


def _allocate(
    scheduler: PlannedScheduler, running: list[Request]
) -> tuple[list[Request], dict[str, _BlockIds | None]]:
    """Return the requests that have the block of their next token, and the blocks that are new."""
    new_blocks: dict[str, _BlockIds | None] = {}
    last_place = scheduler.block_size - 1
    allocate_slots = scheduler.kv_cache_manager.allocate_slots
    for index, request in enumerate(running):
        if 0 < request.num_computed_tokens % (last_place + 1) < last_place:
            continue  # it neither begins nor fills a block: see ``GpuBlocks.allocate_slots``
        blocks: KVCacheBlocks | None = allocate_slots(request, 1, num_lookahead_tokens=0)
        if blocks is None:
            return running[:index], new_blocks
        new_blocks[request.request_id] = blocks.get_block_ids(allow_none=True)
    return running, new_blocks


def _cached_requests(
    scheduler: PlannedScheduler,
    scheduled: list[Request],
    num_scheduled_tokens: dict[str, int],
    new_blocks: dict[str, _BlockIds | None],
) -> CachedRequestData:
    """Return the message for the workers, as ``_make_cached_request_data`` does for the V2 runner."""
    known, moved = scheduler.sort_started(scheduled, num_scheduled_tokens)
    requests = [*known, *moved]
    block_ids = [new_blocks.get(request.request_id) for request in known]
    block_ids += [scheduler.kv_cache_manager.get_block_ids(request.request_id) for request in moved]
    tokens: list[list[int]] = []
    if scheduler.use_pp and not isinstance(scheduler, AsyncScheduler):
        tokens = [[request._all_token_ids[request.num_computed_tokens]] for request in requests]
    return CachedRequestData(
        req_ids=[request.request_id for request in requests],
        resumed_req_ids={request.request_id for request in moved},
        new_token_ids=tokens,
        all_token_ids={},
        new_block_ids=block_ids,
        num_computed_tokens=[request.num_computed_tokens for request in requests],
        num_output_tokens=[
            len(request._output_token_ids) + request.num_output_placeholders for request in requests
        ],
    )


def _update_after_decodes(
    scheduler: PlannedScheduler, scheduled: list[Request], output: SchedulerOutput
) -> None:
    """Count the step as computed, as ``_update_after_schedule`` does."""
    is_async = isinstance(scheduler, AsyncScheduler)
    eligible_step = scheduler.current_step + scheduler.parallel_config.pipeline_parallel_size
    for request in scheduled:
        request.num_computed_tokens += 1
        request.num_in_flight_tokens += 1
        request.is_prefill_chunk = False  # it may have been the one token left of a prompt
        if request.structured_output_request is not None:
            output.has_structured_output_requests = True
            output.pending_structured_output_tokens |= is_async and request.num_output_placeholders > 0
        if is_async:
            request.num_output_placeholders += 1
        if is_async or scheduler.use_pp:
            request.next_decode_eligible_step = eligible_step
    scheduler._inflight_prefills.difference_update(scheduled if scheduler._inflight_prefills else ())
    scheduler.finished_req_ids, scheduler.reset_preempted_req_ids = set(), set()
