"""Schedule a step of decodes only, as vLLM's ``schedule`` would, in a fifth of its time.

vLLM's loop is made for chunks, drafts, encoders and preemptions: some 5 µs for each running request. A decode step of
PipeMax has none of these, and the plan has left room for every block. What vLLM calls for the rest of a step is called
here too. A test compares what both return.
"""

from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request


def can_schedule_decodes(scheduler: Scheduler) -> bool:
    """Return whether vLLM is set up with nothing that ``schedule_decodes`` leaves out."""
    return (
        scheduler.use_v2_model_runner
        and scheduler.num_spec_tokens == scheduler.num_lookahead_tokens == 0
        and scheduler.ec_connector is None
        and scheduler.aux_output_connector is None
        and not scheduler.observability_config.enable_logging_iteration_details
    )


def schedule_decodes(scheduler: Scheduler) -> SchedulerOutput | None:
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
    num_scheduled_tokens = dict.fromkeys(new_blocks, 1)
    assert len(num_scheduled_tokens) <= scheduler.max_num_scheduled_tokens
    cached = scheduler._make_cached_request_data(scheduled, [], num_scheduled_tokens, {}, new_blocks)
    output = SchedulerOutput(
        scheduled_new_reqs=[],
        scheduled_cached_reqs=cached,
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
    scheduler._update_after_schedule(output)
    return output


def _allocate(scheduler: Scheduler, running: list[Request]) -> tuple[list[Request], dict[str, KVCacheBlocks]]:
    """Return the requests that have the block of their next token, and the blocks that are new."""
    new_blocks: dict[str, KVCacheBlocks] = {}
    allocate_slots = scheduler.kv_cache_manager.allocate_slots
    for index, request in enumerate(running):
        blocks = allocate_slots(request, 1, num_lookahead_tokens=0)
        if blocks is None:
            return running[:index], new_blocks
        new_blocks[request.request_id] = blocks
    return running, new_blocks
