"""Gather the copies that the workers make with a step: turn requests into block ids.

This module decides nothing: the plan says which requests leave and which come, vLLM which GPU blocks they have.
"""

from collections.abc import Mapping

from vllm.v1.request import Request

from pipemax.domain.units import GpuBlockId, ceil_div
from pipemax.transfer.commands import BlockPrefetch, BlockStore, StepCopies, TokenStore
from pipemax.transfer.store_fences import StoreFences
from pipemax.vllm_ext.scheduler.gpu_blocks import GpuBlocks
from pipemax.vllm_ext.scheduler.host_blocks import HostBlocks


class CopyGatherer:
    """Gathers the copies of one step after the other; ``take`` returns those gathered since its last call."""

    def __init__(self, gpu: GpuBlocks, host: HostBlocks, block_tokens: int) -> None:
        self._gpu = gpu
        self._host = host
        self._block_tokens = block_tokens
        self._fences = StoreFences()
        self._saves: list[BlockStore] = []
        self._prefetches: list[BlockPrefetch] = []
        self._later_prefetches: list[BlockPrefetch] = []
        self._abandons_prefetches = False

    def save_last(self, request_id: str) -> None:
        """Save a request's last block before it leaves the GPU, if the host lacks part of the block."""
        last = self._host.save_last(request_id)
        if last is not None:
            source = self._gpu.block(request_id, last.block_index)
            self._saves.append(BlockStore(source=source, target=last.host_block))

    def prefetch(self, request_id: str, first_block: int, end_block: int, *, is_last: bool) -> int:
        """Prefetch a request's blocks [first, end), which are allocated on the GPU. Return how many they are.

        ``is_last``: the next step may run the request; otherwise more of it has to come first.
        """
        gpu_blocks, host_blocks = self._gpu.blocks(request_id), self._host.blocks(request_id)
        indexes = range(first_block, end_block)
        prefetches = self._prefetches if is_last else self._later_prefetches
        prefetches += [
            BlockPrefetch(source=host_blocks[index], target=gpu_blocks[index]) for index in indexes
        ]
        return len(indexes)

    def abandon_prefetches(self) -> None:
        """Note that a request of which only a part was prefetched gives its blocks back."""
        self._abandons_prefetches = True

    def take(self, requests: Mapping[str, Request], num_scheduled_tokens: Mapping[str, int]) -> StepCopies:
        """Return all copies of a step that runs these, with the stores that keep every replica complete."""
        stores: list[BlockStore] = []
        token_stores: list[TokenStore] = []
        overwrites: list[GpuBlockId] = []
        for request_id, num_tokens in num_scheduled_tokens.items():
            request = requests[request_id]
            computed = request.num_computed_tokens
            first, end = (ceil_div(count, self._block_tokens) for count in (computed, computed + num_tokens))
            overwrites += [self._gpu.block(request_id, index) for index in range(first, end)]
            # Counted from what the host has, not from what is computed: KV found on the GPU is replicated too.
            for part in self._host.extend(request_id, computed + num_tokens, request.block_hashes):
                source = self._gpu.block(request_id, part.block_index)
                if part.num_slots == self._block_tokens:
                    stores.append(BlockStore(source=source, target=part.host_block))
                else:
                    slots = (part.first_slot, part.num_slots)
                    token_stores.append(TokenStore(source, part.host_block, *slots))
        saves, prefetches, later_prefetches = (
            tuple(self._saves),
            tuple(self._prefetches),
            tuple(self._later_prefetches),
        )
        abandons_prefetches, self._abandons_prefetches = self._abandons_prefetches, False
        for taken in (self._saves, self._prefetches, self._later_prefetches):
            taken.clear()
        fence = self._fences.plan_step(
            overwrites=overwrites, saves=saves, stores=stores, token_stores=token_stores
        )
        return StepCopies(
            saves=saves,
            prefetches=prefetches,
            later_prefetches=later_prefetches,
            abandons_prefetches=abandons_prefetches,
            stores=tuple(stores),
            token_stores=tuple(token_stores),
            store_fence=fence,
        )
