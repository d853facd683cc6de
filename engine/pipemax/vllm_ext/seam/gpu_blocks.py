"""Evict and prefetch through vLLM's KV cache manager, the only owner of the GPU's blocks.

Evicting frees a request's blocks and leaves everything else of the request as it is. Blocks that were computed on the
GPU, or that several requests share, keep their content hashes until they are overwritten: a request that finds such
blocks when it is prefetched needs copies of only the rest.

A step may evict and prefetch a hundred requests of dozens of blocks each. The evicted ones' blocks without a hash go
straight to the prefetched ones, as vLLM's pool would hand them out too, by way of its free list; but in ascending
order, because copies between blocks that are neighbours in both pools are one copy.
"""

from itertools import islice
from operator import attrgetter
from typing import Any

from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.core.kv_cache_utils import (
    BlockHash,
    BlockHashWithGroupId,
    KVCacheBlock,
    make_block_hash_with_group_id,
)
from vllm.v1.request import Request

from pipemax.domain.units import GpuBlockId, ceil_div

_BLOCK_ID = attrgetter("block_id")
_DECODE = {"num_lookahead_tokens": 0}
"""What else vLLM's scheduler says of a running request."""


class GpuBlocks:
    """The few calls to vLLM's manager that PipeMax adds to vLLM's own."""

    def __init__(self, manager: KVCacheManager, block_tokens: int) -> None:
        self._manager = manager
        self._pool = manager.block_pool
        self._group = manager.coordinator.single_type_managers[0]
        self._blocks_of = self._group.req_to_blocks
        self._hash_end = make_block_hash_with_group_id(BlockHash(b""), self._group.kv_cache_group_id)
        self._block_tokens = block_tokens
        self._unpublished: list[tuple[Request, int]] = []
        self._held: list[KVCacheBlock] = []
        self._vacated: list[KVCacheBlock] = []  # still counted as in use
        self._is_sorted = True  # the vacated blocks, by their ids
        self._allocate_slots, self._cache_blocks = manager.allocate_slots, manager.cache_blocks
        manager.allocate_slots = self.allocate_slots  # type: ignore[method-assign]
        manager.cache_blocks = self.cache_blocks  # type: ignore[method-assign]

    def allocate_slots(
        self, request: Request, num_new_tokens: int, *args: Any, **kwargs: Any
    ) -> KVCacheBlocks | None:
        """Answer vLLM's scheduler for its manager: at once for a decode, most of which have room in their last block.

        vLLM's manager takes some 6 µs to find out that nothing is to be done.
        """
        if num_new_tokens != 1 or args or kwargs != _DECODE:
            return self._allocate_slots(request, num_new_tokens, *args, **kwargs)
        if 0 < request.num_computed_tokens % self._block_tokens < self._block_tokens - 1:
            return self._manager.empty_kv_cache_blocks
        return self._allocate_at_border(request)

    def _allocate_at_border(self, request: Request) -> KVCacheBlocks | None:
        """Answer for a decode that begins a block or fills one: with one group of full attention it frees none."""
        computed, blocks = request.num_computed_tokens, self._blocks_of[request.request_id]
        new_blocks: list[KVCacheBlock] = []
        if len(blocks) * self._block_tokens <= computed < self._manager.max_model_len:
            if not self._pool.get_num_free_blocks():
                return None
            new_blocks = self._pool.get_new_blocks(1)
            blocks += new_blocks
        self.cache_blocks(request, min(computed + 1, request.num_tokens))
        return KVCacheBlocks((new_blocks,)) if new_blocks else self._manager.empty_kv_cache_blocks

    def cache_blocks(self, request: Request, num_computed_tokens: int) -> None:
        """Answer vLLM's scheduler for its manager: at once where there is no block to enter into the prefix cache.

        That is for nearly every output token: it fills no block, or the request has left the GPU since.
        """
        request_id = request.request_id
        num_full = num_computed_tokens // self._block_tokens
        if num_full > self._group.num_cached_block.get(request_id, 0) and request_id in self._blocks_of:
            self._cache_blocks(request, num_computed_tokens)

    @property
    def num_free(self) -> int:
        """The number of free blocks, including those that still hold KV."""
        return self._pool.get_num_free_blocks() + len(self._vacated)

    def resize(self, num_blocks: int | None) -> None:
        """Leave this many blocks to requests, ``None`` for all, and forget every prefix. No request may hold any.

        ``ValueError`` if there are fewer.
        """
        pool = self._pool
        pool.free_blocks(self._held)
        self._held = []
        if not self._manager.reset_prefix_cache():
            raise ValueError("requests hold blocks of the GPU pool that is to be resized")
        if num_blocks is None:
            return
        if num_blocks > self.num_free:
            raise ValueError(f"the GPU pool has {self.num_free} blocks, not {num_blocks}")
        self._held = pool.get_new_blocks(self.num_free - num_blocks)

    def tables(self, request_id: str) -> tuple[list[int], ...]:
        """Return the ids of the request's blocks, in order of its sequence, for each group of layers."""
        return (list(map(_BLOCK_ID, self._blocks_of[request_id])),)

    def block(self, request_id: str, index: int, group: int = 0) -> GpuBlockId:
        """Return one of the request's blocks, at the same cost for any length of sequence."""
        return GpuBlockId(self._blocks_of[request_id][index].block_id)

    def new_blocks(self, request_id: str, first: int, end: int) -> list[GpuBlockId]:
        """Return the request's blocks ``[first, end)`` of its sequence, in all groups."""
        return [GpuBlockId(block.block_id) for block in self._blocks_of[request_id][first:end]]

    def kv_blocks(self, request_id: str, num_tokens: int) -> list[int]:
        """Return the ids of the blocks for its first ``num_tokens`` tokens, in the order of its replica."""
        return list(map(_BLOCK_ID, self._blocks_of[request_id]))

    def free_skipped(self, request: Request) -> None:
        """Free what the request's next step no longer attends to. Nothing, with full attention.

        vLLM does that when the steps in flight are done. But workers take steps and copies first in, first out, as
        for ``evict``.
        """

    def evict(self, request: Request) -> None:
        """Free a request's blocks, even while a step in flight writes to them: steps run first in, first out.

        Call ``return_vacated`` before vLLM's scheduler looks for free blocks.
        """
        self._vacate(self._manager.pop_blocks_for_free(request))

    def overwrite(self, request: Request, first: int, end: int) -> list[int]:
        """Free blocks ``[first, end)`` of a request, which the step being made still reads; return their ids.

        To vLLM they have left a window: the request's table holds null blocks in their place until it is evicted, and
        its other blocks keep their places. Call ``return_vacated`` as for ``evict``.
        """
        request_id = request.request_id
        blocks = self._blocks_of[request_id]
        freed = blocks[first:end]
        blocks[first:end] = [self._pool.null_block] * len(freed)
        # vLLM enters a block into the prefix cache when it knows its last token, which may come after this.
        self._group.num_cached_block[request_id] = max(end, self._group.num_cached_block.get(request_id, 0))
        self._vacate(freed)
        return [block.block_id for block in freed]

    def _vacate(self, blocks: list[KVCacheBlock]) -> None:
        null = self._pool.null_block
        vacated = [
            block
            for block in blocks
            if block._block_hash is None and block.ref_cnt == 1 and block is not null
        ]
        self._vacated += vacated
        self._is_sorted = False
        if len(vacated) < len(blocks):
            # Others share them, or may find them by their hashes. The last go first, as vLLM frees them.
            kept = [
                block
                for block in blocks
                if not block.is_null and (block.ref_cnt > 1 or block._block_hash is not None)
            ]
            self._pool.free_blocks(reversed(kept))

    def return_vacated(self) -> None:
        """Give what evicted requests held, and no prefetched one took, to vLLM's pool."""
        if self._vacated:
            self._pool.free_blocks(reversed(self._vacated))
            self._vacated.clear()

    def allocate_for_prefetch(self, request: Request) -> int | None:
        """Allocate blocks for a request's whole sequence and its next token.

        Returns how many of its leading blocks still hold its KV: the others must be filled. ``None``, with nothing
        changed, if there are too few blocks. The request's KV must be complete but for the last token, and nothing of
        it may be in flight.
        """
        request_id = request.request_id
        assert not self._blocks_of.get(request_id), f"{request_id} has blocks on the GPU"
        blocks_found = self._find_blocks(request)
        num_tokens = min(request.num_computed_tokens + 1, self._manager.max_model_len)
        num_new = ceil_div(num_tokens, self._block_tokens) - len(blocks_found)
        if num_new + len([block for block in blocks_found if block.ref_cnt == 0]) > self.num_free:
            return None
        self._pool.touch(blocks_found)
        new_blocks = self._take(num_new)
        self._blocks_of[request_id] = [*blocks_found, *new_blocks]
        # Others must not find what is not filled yet.
        self._group.num_cached_block[request_id] = len(blocks_found)
        return len(blocks_found)

    def _find_blocks(self, request: Request) -> list[KVCacheBlock]:
        """Return the leading blocks of a request that still hold its KV on the GPU, as vLLM's manager finds them."""
        blocks_found: list[KVCacheBlock] = []
        if not self._manager.prefix_cache_lookup_enabled(request):
            return blocks_found
        find = self._pool.cached_block_hash_to_block.get_one_block
        # The last token is computed in any case: the block that it ends is not looked for.
        num_whole = (request.num_tokens - 1) // self._block_tokens
        for block_hash in islice(request.block_hashes, num_whole):
            block = find(BlockHashWithGroupId(block_hash + self._hash_end))
            if block is None:
                break
            blocks_found.append(block)
        return blocks_found

    def _take(self, num_blocks: int) -> list[KVCacheBlock]:
        """Take blocks in ascending order, vacated ones first."""
        if not self._is_sorted:
            self._vacated.sort(key=_BLOCK_ID)
            self._is_sorted = True
        kept = max(0, len(self._vacated) - num_blocks)
        taken = self._vacated[kept:]
        del self._vacated[kept:]
        if len(taken) < num_blocks:
            taken += self._pool.get_new_blocks(num_blocks - len(taken))
            taken.sort(key=_BLOCK_ID)
        return taken

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
            num_cached = self._group.num_cached_block.get(request_id)
            if num_cached is None:
                continue  # it has left the GPU since
            if num_shared > num_cached:
                self._cache_blocks(request, num_shared * self._block_tokens)
            # To vLLM the others are cached, so that it does not enter them with the request's next step.
            num_full = request.num_computed_tokens // self._block_tokens
            self._group.num_cached_block[request_id] = max(num_full, self._group.num_cached_block[request_id])
        self._unpublished.clear()
