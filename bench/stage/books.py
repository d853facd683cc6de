"""Records the blocks that requests hold in both pools, and what a plan's step copies.

This is otherwise the work of vLLM and its extension. It carries out plans in block ids; it decides nothing and moves
nothing.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain

import numpy as np

from pipemax.domain.plan import Prefetch, StepPlan
from pipemax.domain.units import GpuBlockId, HostBlockId, RequestId, ceil_div
from pipemax.transfer.commands import BlockPrefetch, BlockStore, StepCopies, TokenStore
from pipemax.transfer.store_fences import StoreFences


@dataclass(slots=True)
class Held:
    """One request's KV."""

    gpu: list[GpuBlockId]
    """GPU blocks in order; empty while the KV is only on the host."""
    host: list[HostBlockId]
    num_tokens: int
    """Tokens with KV in both pools once the last step's stores are complete."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedPrefetches:
    """The prefetches of one plan, by the step that may read them first."""

    next_step: tuple[BlockPrefetch, ...] = ()
    later: tuple[BlockPrefetch, ...] = ()
    """Prefetches of requests that need more before they run."""

    def __len__(self) -> int:
        return len(self.next_step) + len(self.later)


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A run of new tokens of one request in this step."""

    request_id: RequestId
    first_token: int
    num_tokens: int


class BlockBooks:
    """The blocks of both pools. Free blocks are taken oldest first, as in vLLM.

    Raises ``AssertionError`` if a plan asks for more than is free.
    """

    def __init__(
        self, *, gpu_blocks: int, host_blocks: int, block_tokens: int, keeps_replica: bool = True
    ) -> None:
        """Begin with all blocks free. ``keeps_replica``: store what steps compute, as systems with prefetch do."""
        self._block_tokens = block_tokens
        self._keeps_replica = keeps_replica
        self._free_gpu = deque(GpuBlockId(block) for block in range(gpu_blocks))
        self._free_host = deque(HostBlockId(block) for block in range(host_blocks))
        self.held: dict[RequestId, Held] = {}
        self._fences = StoreFences()
        self._prefetching: set[RequestId] = set()  # on the GPU in part
        self._abandons_prefetches = False

    def begin(self, plan: StepPlan) -> PlannedPrefetches:
        """Free what the plan takes off the GPU, allocate what it brings there, and return the prefetches."""
        for request_id in plan.recompute:
            self.finish(request_id)
        for request_id in plan.evict:
            held = self.held[request_id]
            self._free_gpu.extend(held.gpu)
            held.gpu = []
            self._stop_prefetching(request_id)
        next_step, later = list[BlockPrefetch](), list[BlockPrefetch]()
        for item in plan.prefetch:
            (next_step if item.is_last else later).extend(self._prefetch(item))
        return PlannedPrefetches(next_step=tuple(next_step), later=tuple(later))

    def grow(self, pieces: Iterable[Piece]) -> None:
        """Allocate what the step's new tokens need, in both pools."""
        for piece in pieces:
            held = self.held.setdefault(piece.request_id, Held([], [], 0))
            assert held.num_tokens == piece.first_token, (piece, held)
            held.num_tokens += piece.num_tokens
            num_blocks = ceil_div(held.num_tokens, self._block_tokens)
            while len(held.gpu) < num_blocks:
                held.gpu.append(self._take_gpu())
            while len(held.host) < num_blocks:
                assert self._free_host, "the host pool is used up"
                held.host.append(self._free_host.popleft())

    def copies(self, pieces: Iterable[Piece], prefetches: PlannedPrefetches) -> StepCopies:
        """Return everything that the step copies: whole blocks by copy engine, the rest token by token."""
        stores: list[BlockStore] = []
        token_stores: list[TokenStore] = []
        overwritten: list[GpuBlockId] = []
        for piece in pieces:
            held = self.held[piece.request_id]
            end = piece.first_token + piece.num_tokens
            for index in range(piece.first_token // self._block_tokens, ceil_div(end, self._block_tokens)):
                first = max(0, piece.first_token - index * self._block_tokens)
                last = min(self._block_tokens, end - index * self._block_tokens)
                gpu, host = held.gpu[index], held.host[index]
                if first == 0:
                    overwritten.append(gpu)
                if last - first == self._block_tokens:
                    stores.append(BlockStore(gpu, host))
                else:
                    token_stores.append(TokenStore(gpu, host, first_slot=first, num_slots=last - first))
        if not self._keeps_replica:
            stores, token_stores, prefetches = [], [], PlannedPrefetches()
        fence = self._fences.plan_step(
            overwrites=overwritten, saves=(), stores=stores, token_stores=token_stores
        )
        abandons_prefetches, self._abandons_prefetches = self._abandons_prefetches, False
        return StepCopies(
            prefetches=prefetches.next_step,
            later_prefetches=prefetches.later,
            abandons_prefetches=abandons_prefetches,
            stores=tuple(stores),
            token_stores=tuple(token_stores),
            store_fence=fence,
        )

    def finish(self, request_id: RequestId) -> None:
        """Free a request's blocks in both pools."""
        held = self.held.pop(request_id, None)
        if held is not None:
            self._free_gpu.extend(held.gpu)
            self._free_host.extend(held.host)
            self._stop_prefetching(request_id)

    def is_whole(self, request_id: RequestId) -> bool:
        """Return whether all of a request's GPU blocks were prefetched or computed, or their prefetch has begun."""
        return request_id not in self._prefetching

    @property
    def num_free_gpu(self) -> int:
        return len(self._free_gpu)

    def tables(self, requests: Iterable[RequestId]) -> np.ndarray:
        """Return int32 (requests, most blocks): each request's GPU blocks in order, padded with block 0."""
        rows = [self.held[request_id].gpu for request_id in requests]
        lengths = np.fromiter(map(len, rows), dtype=np.int64, count=len(rows))
        tables = np.zeros((len(rows), int(lengths.max())), dtype=np.int32)
        blocks = np.fromiter(chain.from_iterable(rows), dtype=np.int32, count=int(lengths.sum()))
        tables[np.arange(tables.shape[1]) < lengths[:, None]] = blocks
        return tables

    def _prefetch(self, item: Prefetch) -> list[BlockPrefetch]:
        held = self.held[item.request_id]
        if item.is_first:
            assert not held.gpu, f"{item.request_id} is on the GPU already"
            held.gpu = [self._take_gpu() for _ in range(ceil_div(held.num_tokens + 1, self._block_tokens))]
        self._prefetching.add(item.request_id)
        if item.is_last:
            self._prefetching.discard(item.request_id)
        blocks = range(item.first_block, item.first_block + item.num_blocks)
        return [BlockPrefetch(held.host[block], held.gpu[block]) for block in blocks]

    def _stop_prefetching(self, request_id: RequestId) -> None:
        if request_id in self._prefetching:
            self._prefetching.discard(request_id)
            self._abandons_prefetches = True

    def _take_gpu(self) -> GpuBlockId:
        assert self._free_gpu, "the GPU pool is used up"
        return self._free_gpu.popleft()
