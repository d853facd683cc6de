"""Carry out a plan's evictions, prefetches and waves: turn requests into blocks freed, blocks taken and copies.

There is no policy here: the plan says which requests leave the GPU and which come.
"""

from collections.abc import Iterable, Mapping

from pipemax.domain.plan import Prefetch
from pipemax.vllm_ext.scheduler.host_blocks import HostBlocks
from pipemax.vllm_ext.scheduler.scheduler_stats import Counters
from pipemax.vllm_ext.scheduler.step_copies import CopyGatherer
from pipemax.vllm_ext.scheduler.worker_slots import WorkerState
from pipemax.vllm_ext.seam.gpu_blocks import GpuBlocks
from pipemax.vllm_ext.seam.vllm_types import Request


class KvMoves:
    """Moves requests between the GPU and the host. Not thread-safe."""

    def __init__(
        self,
        gpu: GpuBlocks,
        host: HostBlocks,
        copies: CopyGatherer,
        workers: WorkerState,
        block_tokens: int,
    ) -> None:
        self._gpu = gpu
        self._host = host
        self._copies = copies
        self._workers = workers
        self._block_tokens = block_tokens
        # Blocks of the prefix that the controller knows, where there is one.
        self._prefix_blocks: dict[str, int] = {}
        self._num_found: dict[str, int] = {}  # by request being prefetched: leading blocks that need no copy
        self.overwritten: list[str] = []
        """Requests that the wave of the last step overwrites."""

    def note_prefix(self, request_id: str, num_blocks: int) -> None:
        """Note the length of the prefix by which the controller knows a request."""
        self._prefix_blocks[request_id] = num_blocks

    def evict(self, request: Request) -> None:
        """Free a request's GPU blocks; the host has its replica, once its last block is saved."""
        self._copies.save_last(request.request_id)
        self._gpu.evict(request)
        self._workers.leave_gpu(request.request_id)
        self._stop_prefetching(request.request_id)

    def evict_overwritten(self, started: Mapping[str, Request]) -> None:
        """Evict what the last step has overwritten, of which it left the block that it wrote to."""
        for request_id in self.overwritten:
            if request_id in started:  # it has not ended since
                self.evict(started[request_id])
        self.overwritten.clear()

    def overwrite(self, requests: Iterable[Request]) -> None:
        """Free what a wave may overwrite of requests that the step runs; their block tables are made already."""
        for request in requests:
            first = self._prefix_blocks.get(request.request_id, 0)
            end = request.num_computed_tokens // self._block_tokens
            self._copies.let_waves_overwrite(self._gpu.overwrite(request, first, end))
            self.overwritten.append(request.request_id)

    def prefetch(self, request: Request, item: Prefetch, counters: Counters) -> bool:
        """Allocate GPU blocks for the whole request with its first part; then add the copies of what is missing.

        Return False, with nothing changed, if there are too few blocks.
        """
        request_id = request.request_id
        if item.is_first:
            num_found = self._gpu.allocate_for_prefetch(request)
            if num_found is None:
                return False
            self._num_found[request_id] = num_found
            self._workers.note_prefetch(request_id)
            counters.prefetches += 1
            counters.found_blocks += num_found
        # The first part begins where the KV found on the GPU ends, wherever the plan expected that.
        first_block = 0 if item.is_first else item.first_block
        first_block = max(first_block, self._num_found[request_id])
        end_block = item.first_block + item.num_blocks
        counters.prefetched_blocks += self._copies.prefetch(
            request_id, first_block, end_block, is_last=item.is_last
        )
        if item.is_last:
            del self._num_found[request_id]
            # The controller counts on its prefix even if no other request has begun with it.
            num_shared = max(self._host.num_shared(request_id), self._prefix_blocks.get(request_id, 0))
            self._gpu.publish_later(request, num_shared)
        return True

    def drop(self, request_id: str) -> None:
        """Forget all KV of a request, wherever it is but in vLLM's tables."""
        self._host.release(request_id)
        self._workers.release(request_id)
        self._stop_prefetching(request_id)

    def forget(self, request_id: str) -> None:
        """Forget a request that has ended, with its KV."""
        self._prefix_blocks.pop(request_id, None)
        self.drop(request_id)

    def _stop_prefetching(self, request_id: str) -> None:
        if self._num_found.pop(request_id, None) is not None:
            self._copies.abandon_prefetches()
