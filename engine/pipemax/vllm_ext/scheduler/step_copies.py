"""Gather the copies that the workers make with a step: turn requests into block ids.

This module decides nothing: the plan says which requests leave and which come, vLLM which GPU blocks they have.
"""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress

import numpy as np

from pipemax.domain.units import GpuBlockId
from pipemax.transfer.commands import BlockPrefetch, BlockStore, CopyRows, Int32s, Row, StepCopies, TokenStore
from pipemax.transfer.store_fences import CopyFences
from pipemax.vllm_ext.scheduler.host_blocks import HostBlocks, int32s
from pipemax.vllm_ext.seam.gpu_blocks import GpuBlocks
from pipemax.vllm_ext.seam.vllm_types import Request


@dataclass(slots=True)
class _Pairs:
    """Whole-block copies being gathered."""

    sources: "array[int]" = field(default_factory=int32s)
    targets: "array[int]" = field(default_factory=int32s)

    def rows(self, kind: type[Row]) -> CopyRows[Row]:
        return CopyRows(kind, np.array([self.sources, self.targets], dtype=np.int32).T)


class CopyGatherer:
    """Gathers the copies of one step after the other; ``take`` returns those gathered since its last call."""

    def __init__(self, gpu: GpuBlocks, host: HostBlocks, block_tokens: int) -> None:
        self._gpu = gpu
        self._host = host
        self._block_tokens = block_tokens
        self._fences = CopyFences()
        self._saves: list[BlockStore] = []
        self._prefetches = _Pairs()
        self._later_prefetches = _Pairs()
        self._abandons_prefetches = False
        # In a wave: prefetches to these blocks follow the step's computation.
        self._overwritten: list[int] = []
        self._stores = _Pairs()
        self._token_rows: list[Int32s] = []  # of token stores of one token each
        self._tokens = int32s()  # of all other token stores, one field after the other
        self._begun: list[GpuBlockId] = []  # blocks that the step writes from their first slot on

    def save_last(self, request_id: str) -> None:
        """Save a request's last block before it leaves the GPU, if the host lacks part of the block."""
        for last in self._host.save_last(request_id):
            source = self._gpu.block(request_id, last.block_index, last.group)
            self._saves.append(BlockStore(source=source, target=last.host_block))

    def prefetch(self, request_id: str, first_block: int, end_block: int, *, is_last: bool) -> int:
        """Prefetch blocks [first, end) of a request's replica, which are allocated on the GPU. Return their number.

        ``is_last``: the next step may run the request; otherwise more of it has to come first.
        """
        prefetches = self._prefetches if is_last else self._later_prefetches
        prefetches.sources.extend(self._host.blocks(request_id)[first_block:end_block])
        num_tokens = self._host.num_tokens(request_id)
        prefetches.targets.extend(self._gpu.kv_blocks(request_id, num_tokens)[first_block:end_block])
        if num_tokens % self._block_tokens:
            last = self._gpu.block(request_id, num_tokens // self._block_tokens)
            self._host.note_gpu_end(request_id, last)
        return max(0, end_block - first_block)

    def abandon_prefetches(self) -> None:
        """Note that a request of which only a part was prefetched gives its blocks back."""
        self._abandons_prefetches = True

    def let_waves_overwrite(self, blocks: Sequence[int]) -> None:
        """Note that the step still reads these GPU blocks, which its prefetches may overwrite behind it."""
        self._overwritten += blocks

    def store(self, requests: Mapping[str, Request], num_scheduled_tokens: Mapping[str, int]) -> None:
        """Gather the stores that keep every replica complete, of a step that runs these."""
        size, stores, tokens = self._block_tokens, self._stores, self._tokens
        rows, is_grown = self._host.extend_within(num_scheduled_tokens)
        self._token_rows.append(rows)
        for request_id, num_tokens in compress(num_scheduled_tokens.items(), (~is_grown).tolist()):
            request = requests[request_id]
            computed = request.num_computed_tokens
            end = computed + num_tokens
            first_new, end_block = -(-computed // size), -(-end // size)
            if first_new < end_block:
                self._begun += self._gpu.new_blocks(request_id, first_new, end_block)
            # Counted from what the host has, not from what is computed: KV found on the GPU is replicated too.
            for index, host_block, first_slot, num_slots, group in self._host.extend(
                request_id, end, request.block_hashes
            ):
                source = self._gpu.block(request_id, index, group)
                if num_slots == size:
                    stores.sources.append(source)
                    stores.targets.append(host_block)
                else:
                    tokens.extend((source, host_block, first_slot, num_slots))
            if end % size:
                self._host.note_gpu_end(request_id, self._gpu.block(request_id, end // size))

    def take(self, *, in_groups: bool = False) -> StepCopies:
        """Return all copies of a step. ``in_groups``: it computes group of layers by group of layers."""
        saves, self._saves = tuple(self._saves), []
        block_stores, self._stores = self._stores.rows(BlockStore), _Pairs()
        rest = np.array(self._tokens, dtype=np.int32).reshape(-1, 4)
        token_stores = CopyRows(TokenStore, np.concatenate([*self._token_rows, rest]))
        self._tokens, self._token_rows = int32s(), []
        prefetches, self._prefetches = self._prefetches.rows(BlockPrefetch), _Pairs()
        later_prefetches, self._later_prefetches = self._later_prefetches.rows(BlockPrefetch), _Pairs()
        abandons_prefetches, self._abandons_prefetches = self._abandons_prefetches, False
        begun, self._begun = self._begun, []
        store_fence, prefetch_fence = self._fences.plan_step(
            overwrites=begun,
            saves=saves,
            prefetches=prefetches.joined(later_prefetches),
            stores=block_stores,
            token_stores=token_stores,
        )
        wave = _NO_PREFETCHES
        if self._overwritten:
            prefetches, behind = _split(prefetches, self._overwritten)
            later_prefetches, behind_later = _split(later_prefetches, self._overwritten)
            wave = behind.joined(behind_later)
            self._overwritten.clear()
        return StepCopies(
            saves=saves,
            prefetches=prefetches,
            later_prefetches=later_prefetches,
            wave_prefetches=wave,
            in_groups=in_groups,
            abandons_prefetches=abandons_prefetches,
            stores=block_stores,
            token_stores=token_stores,
            store_fence=store_fence,
            prefetch_fence=prefetch_fence,
        )


_NO_PREFETCHES = _Pairs().rows(BlockPrefetch)


def _split(
    prefetches: CopyRows[BlockPrefetch], blocks: Sequence[int]
) -> tuple[CopyRows[BlockPrefetch], CopyRows[BlockPrefetch]]:
    """Return the prefetches to other GPU blocks than these, and those to these."""
    targets, overwritten = prefetches.table[:, 1], np.array(blocks, dtype=np.int64)
    is_overwritten = np.zeros(1 + max(targets.max(initial=0), overwritten.max(initial=0)), dtype=bool)
    is_overwritten[overwritten] = True
    is_behind = is_overwritten[targets]
    return (
        CopyRows(BlockPrefetch, prefetches.table[~is_behind]),
        CopyRows(BlockPrefetch, prefetches.table[is_behind]),
    )
