"""Tell vLLM's V2 model runner that a request's KV is now in other blocks.

The runner keeps the tokens, sampling state and block table of a request in a slot, until the request finishes or is
preempted. It does not know that a request's KV can be prefetched to other blocks. The scheduler sends such requests as
resumed, with all their blocks, and here their block tables are overwritten. Everything else in the slot is unchanged.

This module knows nothing of slots that run out: the scheduler (``vllm_ext.scheduler.worker_slots``) tracks them.
"""

from typing import TYPE_CHECKING

from vllm.v1.core.sched.output import SchedulerOutput

if TYPE_CHECKING:  # seconds to import, and engines with the V1 runner do without
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner


def keep_slots_of_parked(runner: "GPUModelRunner") -> None:
    """Make a runner overwrite block tables after prefetches; call it before or after the model is loaded."""
    update_requests = runner.update_requests

    def update_after_prefetches(scheduler_output: SchedulerOutput) -> None:
        cached = scheduler_output.scheduled_cached_reqs
        for index, request_id in enumerate(cached.req_ids):
            if request_id in cached.resumed_req_ids:
                slot = runner.req_states.req_id_to_index[request_id]
                block_ids = cached.new_block_ids[index]
                assert block_ids is not None, f"{request_id} is resumed without its blocks"
                runner.block_tables.append_block_ids(slot, block_ids, overwrite=True)
                cached.new_block_ids[index] = None  # nothing to append
        update_requests(scheduler_output)

    runner.update_requests = update_after_prefetches  # type: ignore[method-assign]  # wrapped on purpose
