"""Evict and prefetch, in terms of vLLM's KV cache manager, which alone owns the GPU's blocks.

Evicting frees a request's blocks and leaves everything else of it as it is. They keep their content hashes until
someone overwrites them, so a request that is prefetched soon, or that shares a prefix with a resident one, finds part
of its blocks and needs copies of the rest only.
"""

from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.request import Request

from pipemax.domain.units import GpuBlockId


class GpuBlocks:
    """The few calls on vLLM's manager that PipeMax adds to its own use of it."""

    def __init__(self, manager: KVCacheManager, block_tokens: int) -> None:
        self._manager = manager
        self._block_tokens = block_tokens
        self._unpublished: list[Request] = []

    @property
    def num_free(self) -> int:
        """Free blocks, those among them that still hold something included."""
        return self._manager.block_pool.get_num_free_blocks()

    def blocks(self, request_id: str) -> list[GpuBlockId]:
        """In order of its sequence."""
        (ids,) = self._manager.get_block_ids(request_id)
        return [GpuBlockId(block) for block in ids]

    def block(self, request_id: str, index: int) -> GpuBlockId:
        """One of them, however long the sequence."""
        (blocks,) = self._manager.coordinator.get_blocks(request_id)
        return GpuBlockId(blocks[index].block_id)

    def evict(self, request: Request) -> None:
        """Free its blocks, even while a step that writes to them is in flight: steps run first in, first out."""
        self._manager.free(request)

    def allocate_for_prefetch(self, request: Request) -> int | None:
        """Blocks for its whole sequence and its next token; None, and nothing changed, where there are too few.

        The result counts its leading blocks that still hold its KV: the others must be filled. The request's KV is
        complete but for the last token, and nothing of it is in flight.
        """
        computed = request.num_computed_tokens
        for manager in self._manager.coordinator.single_type_managers:
            # An output that arrived while it was parked counted blocks as cached that it no longer had.
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

    def publish_later(self, request: Request) -> None:
        """Its last copy is planned: from the next step on others may share its blocks."""
        self._unpublished.append(request)

    def publish(self) -> None:
        """Between steps: what the last one prefetches may be found from now on, for steps wait for earlier copies."""
        for request in self._unpublished:
            (blocks,) = self._manager.get_block_ids(request.request_id)
            if blocks and not request.is_finished():
                self._manager.cache_blocks(request, request.num_computed_tokens)
        self._unpublished.clear()
