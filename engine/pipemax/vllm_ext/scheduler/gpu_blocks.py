"""Evict and prefetch through vLLM's KV cache manager, the only owner of the GPU's blocks.

Evicting frees a request's blocks and leaves everything else of the request as it is. Blocks that were computed on the
GPU, or that several requests share, keep their content hashes until they are overwritten: a request that finds such
blocks when it is prefetched needs copies of only the rest.
"""

from typing import Any

from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.request import Request

from pipemax.domain.units import GpuBlockId

_DECODE = {"num_lookahead_tokens": 0}
"""What else vLLM's scheduler says of a running request."""


class GpuBlocks:
    """The few calls to vLLM's manager that PipeMax adds to vLLM's own."""

    def __init__(self, manager: KVCacheManager, block_tokens: int) -> None:
        self._manager = manager
        self._block_tokens = block_tokens
        self._unpublished: list[tuple[Request, int]] = []
        self._held: list[KVCacheBlock] = []
        self._allocate_slots = manager.allocate_slots
        manager.allocate_slots = self.allocate_slots  # type: ignore[method-assign]

    def allocate_slots(
        self, request: Request, num_new_tokens: int, *args: Any, **kwargs: Any
    ) -> KVCacheBlocks | None:
        """Answer vLLM's scheduler for its manager: at once for a decode whose last block has room.

        With one group of full attention, such a decode needs no block, fills none and frees none; vLLM's manager takes
        some 6 µs to find that out, for most requests of each step.
        """
        place = request.num_computed_tokens % self._block_tokens
        if num_new_tokens == 1 and 0 < place < self._block_tokens - 1 and not args and kwargs == _DECODE:
            return self._manager.empty_kv_cache_blocks
        return self._allocate_slots(request, num_new_tokens, *args, **kwargs)

    @property
    def num_free(self) -> int:
        """The number of free blocks, including those that still hold KV."""
        return self._manager.block_pool.get_num_free_blocks()

    def resize(self, num_blocks: int | None) -> None:
        """Leave this many blocks to requests, ``None`` for all, and forget every prefix. No request may hold any.

        ``ValueError`` if there are fewer.
        """
        pool = self._manager.block_pool
        pool.free_blocks(self._held)
        self._held = []
        if not self._manager.reset_prefix_cache():
            raise ValueError("requests hold blocks of the GPU pool that is to be resized")
        if num_blocks is None:
            return
        if num_blocks > self.num_free:
            raise ValueError(f"the GPU pool has {self.num_free} blocks, not {num_blocks}")
        self._held = pool.get_new_blocks(self.num_free - num_blocks)

    def blocks(self, request_id: str) -> list[GpuBlockId]:
        """Return the request's blocks, in order of its sequence."""
        (ids,) = self._manager.get_block_ids(request_id)
        return [GpuBlockId(block) for block in ids]

    def block(self, request_id: str, index: int) -> GpuBlockId:
        """Return one of the request's blocks, at the same cost for any length of sequence."""
        (blocks,) = self._manager.coordinator.get_blocks(request_id)
        return GpuBlockId(blocks[index].block_id)

    def evict(self, request: Request) -> None:
        """Free a request's blocks, even while a step in flight writes to them: steps run first in, first out."""
        self._manager.free(request)

    def allocate_for_prefetch(self, request: Request) -> int | None:
        """Allocate blocks for a request's whole sequence and its next token.

        Returns how many of its leading blocks still hold its KV: the others must be filled. ``None``, with nothing
        changed, if there are too few blocks. The request's KV must be complete but for the last token, and nothing of
        it may be in flight.
        """
        computed = request.num_computed_tokens
        for manager in self._manager.coordinator.single_type_managers:
            # An output that arrived while the request was parked counted blocks as cached that it no longer had.
            manager.num_cached_block.pop(request.request_id, None)
        # To vLLM it is a request whose first `found` tokens lie in the prefix cache and the others elsewhere.
        request.num_computed_tokens = 0
        try:
            blocks, found = self._manager.get_computed_blocks(request)[:2]
            assert found % self._block_tokens == 0, (found, self._block_tokens)
            new_blocks = self._manager.allocate_slots(
                request,
                1,
                num_new_computed_tokens=found,
                new_computed_blocks=blocks,
                num_external_computed_tokens=computed - found,
                delay_cache_blocks=True,  # others must not find blocks that are not filled yet
            )
        finally:
            request.num_computed_tokens = computed
        return None if new_blocks is None else found // self._block_tokens

    def publish_later(self, request: Request, num_shared: int) -> None:
        """Let others find its leading ``num_shared`` blocks from the next step on; the last copy is planned."""
        self._unpublished.append((request, num_shared))

    def publish(self) -> None:
        """Let what the last step prefetches be found; called between steps, since steps wait for earlier copies.

        Blocks that no other request shares are not published. Entering their hashes, and taking them out when the
        request leaves the GPU, would cost more than all else of a prefetch, and who needs them is on the GPU already.
        """
        for request, num_shared in self._unpublished:
            request_id = request.request_id
            if request.is_finished():
                continue
            for manager in self._manager.coordinator.single_type_managers:
                if request_id not in manager.num_cached_block:
                    continue  # it has left the GPU since
                if num_shared > manager.num_cached_block[request_id]:
                    self._manager.cache_blocks(request, num_shared * self._block_tokens)
                # To vLLM the others are cached, so that it does not enter them with the request's next step.
                num_full = request.num_computed_tokens // self._block_tokens
                manager.num_cached_block[request_id] = max(num_full, manager.num_cached_block[request_id])
        self._unpublished.clear()
