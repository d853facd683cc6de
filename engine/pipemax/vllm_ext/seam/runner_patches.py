"""Tell vLLM's model runners what they do not ask: where a request's KV is now, and how many requests a step has.

The V2 runner is made cheaper too, where PipeMax does often what stock vLLM does once: adding a request.

The V2 runner keeps the tokens, sampling state and block table of a request in a slot, until the request finishes or is
preempted. It does not know that a request's KV can be prefetched to other blocks. The scheduler sends such requests as
resumed, with all their blocks, and here their block tables are overwritten. Everything else in the slot is unchanged.

This module knows nothing of slots that run out: the scheduler (``vllm_ext.scheduler.worker_slots``) tracks them.
"""

from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from pipemax.vllm_ext.seam.vllm_types import AsyncModelRunnerOutput, ModelRunnerOutput, SchedulerOutput

if TYPE_CHECKING:  # seconds to import, and each worker needs one of them
    from vllm.sequence import IntermediateTensors
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner as GPUModelRunnerV2
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner


def patch_v2_runner(runner: "GPUModelRunnerV2") -> None:
    """Make a V2 runner fit PipeMax, on any device."""
    keep_slots_of_parked(runner)
    stage_tokens_as_array(runner)
    clear_no_drafts(runner)


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


class _Tokens(array):  # type: ignore[type-arg]  # array is generic in the stubs only
    """An array with the method of a list that it lacks."""

    def clear(self) -> None:
        del self[:]


def stage_tokens_as_array(runner: "GPUModelRunnerV2") -> None:
    """Make a runner gather the tokens of the requests that it adds in an array, in place of vLLM's list.

    A request that comes back after it lost its slot brings all its tokens, as an array. From array to array they are
    copied; a list would make an object of each token, and convert each again for the device.
    """
    tokens = runner.req_states.all_token_ids
    # None without pinned memory, where torch makes a tensor of the list.
    if tokens.write_contents is not None:
        assert not tokens._staged_write_contents, "requests are being added"
        tokens._staged_write_contents = _Tokens("i")  # type: ignore[assignment]  # vLLM extends, reads and clears it


class _NoDrafts:
    """Stands for the drafts of all slots where a slot has none."""

    def __getitem__(self, slot: int) -> "_NoDrafts":
        return self

    def zero_(self) -> None:
        pass


def clear_no_drafts(runner: "GPUModelRunnerV2") -> None:
    """Leave out a call on the device for each request that vLLM 0.32 adds: clearing its drafts, which are none.

    Without speculative decoding only; vLLM 0.33 leaves it out itself.
    """
    add_requests, states = runner.add_requests, runner.req_states
    if states.num_speculative_steps:
        return
    none: Any = _NoDrafts()

    def add_without_drafts(scheduler_output: SchedulerOutput) -> None:
        drafts, states.draft_tokens = states.draft_tokens, none
        try:
            add_requests(scheduler_output)
        finally:
            states.draft_tokens = drafts

    runner.add_requests = add_without_drafts  # type: ignore[method-assign]  # wrapped on purpose


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
