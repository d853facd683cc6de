"""Tell vLLM's model runners what they do not ask: where a request's KV is now, and how many requests a step has.

The V2 runner keeps the tokens, sampling state and block table of a request in a slot, until the request finishes or is
preempted. It does not know that a request's KV can be prefetched to other blocks. The scheduler sends such requests as
resumed, with all their blocks, and here their block tables are overwritten. Everything else in the slot is unchanged.

This module knows nothing of slots that run out: the scheduler (``vllm_ext.scheduler.worker_slots``) tracks them.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from pipemax.vllm_ext.seam.vllm_types import AsyncModelRunnerOutput, ModelRunnerOutput, SchedulerOutput

if TYPE_CHECKING:  # seconds to import, and each worker needs one of them
    from vllm.sequence import IntermediateTensors
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner as GPUModelRunnerV2
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner


def keep_slots_of_parked(runner: "GPUModelRunnerV2") -> None:
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


def profile_one_step(runner: "GPUModelRunnerV2", max_num_seqs: int) -> None:
    """Make a runner measure its memory with the requests of one step, where it would sample for all its slots.

    The logits of thousands of slots are gigabytes that no step ever needs.
    """
    profile_run = runner.profile_run

    def profile(*arguments: Any, **more: Any) -> None:
        with limited(runner, "max_num_reqs", max_num_seqs):
            profile_run(*arguments, **more)

    runner.profile_run = profile  # type: ignore[method-assign]  # wrapped on purpose


def watch_received(runner: "GPUModelRunner", on_received: Callable[[], None]) -> None:
    """Have ``on_received`` called whenever the compute stream has been told to wait for the stage before."""
    from vllm.v1.worker.gpu_worker import (
        AsyncIntermediateTensors,  # a worker on a CPU needs none of its module
    )

    execute_model = runner.execute_model

    def execute_watched(
        scheduler_output: SchedulerOutput,
        intermediate_tensors: "IntermediateTensors | None" = None,
        *args: Any,
        **more: Any,
    ) -> "ModelRunnerOutput | AsyncModelRunnerOutput | IntermediateTensors | None":
        if isinstance(intermediate_tensors, AsyncIntermediateTensors):
            callbacks = intermediate_tensors._comm_postprocess or []
            intermediate_tensors._comm_postprocess = [*callbacks, on_received]
        return execute_model(scheduler_output, intermediate_tensors, *args, **more)

    runner.execute_model = execute_watched  # type: ignore[method-assign]  # wrapped on purpose


@contextmanager
def limited(owner: object, name: str, limit: int) -> Iterator[None]:
    """Have an object's number be at most ``limit`` for a while."""
    number = getattr(owner, name)
    setattr(owner, name, min(limit, number))
    try:
        yield
    finally:
        setattr(owner, name, number)
