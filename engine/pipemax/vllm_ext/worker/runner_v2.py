"""Tell vLLM's V2 model runner that a request's KV is now in other blocks, and how many requests a step has.

The runner keeps the tokens, sampling state and block table of a request in a slot, until the request finishes or is
preempted. It does not know that a request's KV can be prefetched to other blocks. The scheduler sends such requests as
resumed, with all their blocks, and here their block tables are overwritten. Everything else in the slot is unchanged.

This module knows nothing of slots that run out: the scheduler (``vllm_ext.scheduler.worker_slots``) tracks them.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

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


def profile_one_step(runner: "GPUModelRunner", max_num_seqs: int) -> None:
    """Make a runner measure its memory with the requests of one step, where it would sample for all its slots.

    The logits of thousands of slots are gigabytes that no step ever needs.
    """
    profile_run = runner.profile_run

    def profile(*arguments: Any, **more: Any) -> None:
        with limited(runner, "max_num_reqs", max_num_seqs):
            profile_run(*arguments, **more)

    runner.profile_run = profile  # type: ignore[method-assign]  # wrapped on purpose


@contextmanager
def limited(owner: object, name: str, limit: int) -> Iterator[None]:
    """Have an object's number be at most ``limit`` for a while."""
    number = getattr(owner, name)
    setattr(owner, name, min(limit, number))
    try:
        yield
    finally:
        setattr(owner, name, number)
