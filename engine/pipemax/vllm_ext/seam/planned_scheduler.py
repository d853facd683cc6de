"""vLLM's scheduler with a public name for each place where a planner joins in.

vLLM's own ``schedule`` does all the work of a step. What it asks its private methods on the way is answered here by
public ones, which the planner's class implements; ``relied_on`` lists the private ones.
"""

import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

from pipemax.vllm_ext.seam.decode_update import DecodeUpdates, can_update_decodes, with_decodes
from pipemax.vllm_ext.seam.repetition import use_faster_check


class PlannedScheduler(Scheduler):
    """Runs over vLLM's synchronous scheduler.

    Every ``super()`` call goes to the asynchronous scheduler if that is a base of the planner's class too.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        use_faster_check()
        # A prompt is admitted by its first chunk; the plan made room for no more.
        self.scheduler_reserve_full_isl = False
        # Freed blocks may be reused while a step that writes to them is in flight: steps are first in, first out.
        self.defer_block_free = False
        self._updates_decodes = can_update_decodes(self)
        self._decode_updates = DecodeUpdates(self)

    # -- what the planner answers -----------------------------------------------------------------------------

    @abstractmethod
    def planned_tokens(self, request_id: str) -> int:
        """Return how many tokens of a request the step computes."""

    @abstractmethod
    def fitting_prefix(self, request: Request, blocks: Sequence[Any], num_found: int) -> int:
        """Return how many of ``num_found`` prefix tokens, in these blocks of the GPU, a request may take."""

    @abstractmethod
    def sort_started(
        self, requests: list[Request], scheduled: dict[str, int]
    ) -> tuple[list[Request], list[Request]]:
        """Return, of a step's requests that ran before, those whose blocks the workers know, and those that moved."""

    @abstractmethod
    def step_metadata(self, output: SchedulerOutput) -> KVConnectorMetadata:
        """Return the message that the connector's workers receive with the step."""

    @abstractmethod
    def request_freed(self, request: Request) -> None:
        """Hear that a request ended, wherever it was."""

    @abstractmethod
    def kv_dropped(self, request: Request) -> None:
        """Hear that vLLM dropped a request's KV by itself, because its prefix cache is reset."""

    # -- what the planner asks --------------------------------------------------------------------------------

    def is_blocked(self, request: Request) -> bool:
        """Return whether the request waits for something else than room, such as its grammar."""
        return self._is_blocked_waiting_status(request.status)

    def unblock(self, request: Request) -> bool:
        """Return whether the request may run now; if its grammar is wrong, vLLM ends it with the next outputs."""
        if not self._handle_blocked_waiting_request(request):
            return False
        self.deferred_waiting.discard(request)
        return True

    def drop_kv(self, request: Request) -> None:
        """Free all KV of a request that has started. It waits in no queue of vLLM's afterwards."""
        super()._preempt_request(request, time.monotonic())
        self.waiting.remove_request(request)

    # -- what vLLM asks ---------------------------------------------------------------------------------------

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        if not self._updates_decodes:
            return super().update_from_output(scheduler_output, model_runner_output)
        rest, decodes = self._decode_updates.take_in(scheduler_output, model_runner_output)
        return with_decodes(super().update_from_output(rest, model_runner_output), decodes)

    def _reserve_prefill_lookahead(
        self, request: Request, num_computed_tokens: int, num_new_tokens: int
    ) -> int:
        return min(num_new_tokens, self.planned_tokens(request.request_id))

    def _get_local_prefix_cache_hit(
        self, request: Request, max_cache_hit_length: int | None = None
    ) -> tuple[KVCacheBlocks, int, int, bool]:
        limit = () if max_cache_hit_length is None else (max_cache_hit_length,)  # vLLM 0.32 knows none
        blocks, num_found, boundary, diverged = super()._get_local_prefix_cache_hit(request, *limit)
        num_taken = self.fitting_prefix(request, blocks.blocks[0], num_found)
        if num_taken < num_found:
            blocks = self.kv_cache_manager.truncate_computed_blocks(blocks, num_taken)
        return blocks, num_taken, boundary, diverged

    def _make_cached_request_data(
        self,
        running_reqs: list[Request],
        resumed_reqs: list[Request],
        num_scheduled_tokens: dict[str, int],
        spec_decode_tokens: dict[str, list[int]],
        req_to_new_blocks: dict[str, KVCacheBlocks],
    ) -> CachedRequestData:
        """Send requests that moved to other GPU blocks as resumed, with all their blocks: workers replace the table."""
        known, moved = self.sort_started(running_reqs, num_scheduled_tokens)
        for request in moved:
            req_to_new_blocks[request.request_id] = self.kv_cache_manager.get_blocks(request.request_id)
        if not (self.use_v2_model_runner or self.scheduler_config.async_scheduling):
            # The workers know every request's tokens; vLLM would send those of all that did not run last. With
            # asynchronous scheduling the V1 runner relies on that: it keeps the sampled tokens of one step only. For
            # the V2 runner vLLM neither reads the set nor ever empties it.
            self.prev_step_scheduled_req_ids.update(num_scheduled_tokens)
        return super()._make_cached_request_data(
            known, [*resumed_reqs, *moved], num_scheduled_tokens, spec_decode_tokens, req_to_new_blocks
        )

    def _update_after_schedule(self, scheduler_output: SchedulerOutput) -> None:
        super()._update_after_schedule(scheduler_output)
        if not (self.use_v2_model_runner and self.use_pp) or isinstance(self, AsyncScheduler):
            return
        # The V2 runner's first stages take in a step's sampled tokens when they begin the step that comes as many
        # steps later as there are stages. vLLM heeds that where it schedules asynchronously.
        for request_id in scheduler_output.num_scheduled_tokens:
            request = self.requests[request_id]
            if not request.is_prefill_chunk:
                request.next_decode_eligible_step = (
                    self.current_step + self.parallel_config.pipeline_parallel_size
                )

    def _build_kv_connector_meta(
        self, connector: KVConnectorBase_V1, scheduler_output: SchedulerOutput
    ) -> KVConnectorMetadata:
        # The V2 runner would make these before it waits for earlier copies.
        written = scheduler_output.kv_cache_block_copies or scheduler_output.new_block_ids_to_zero
        assert not written, f"vLLM itself writes to blocks: {written}"
        return self.step_metadata(scheduler_output)

    def _free_request(
        self, request: Request, delay_free_blocks: bool = False
    ) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
        transfer_params = super()._free_request(request, delay_free_blocks)
        self._decode_updates.forget(request.request_id)
        self.request_freed(request)
        return transfer_params

    def _preempt_request(self, request: Request, timestamp: float, drop_stale_output: bool = False) -> None:
        super()._preempt_request(request, timestamp, drop_stale_output)
        self.waiting.remove_request(request)
        self.kv_dropped(request)


def when_compiled(request: Request, call: Callable[[], None]) -> None:
    """Call once the request's grammar is compiled, or has turned out to be wrong: from any thread, or at once."""
    structured = request.structured_output_request
    assert structured is not None, (
        f"{request.request_id} is {request.status.name}, which policy pipemax never is"
    )
    if isinstance(compiling := structured._grammar, Future):
        compiling.add_done_callback(lambda _: call())
    else:
        call()
