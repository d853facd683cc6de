"""Random legal steps of a stage: admit, run, share prefixes, evict, prefetch, abort, finish, in small pools.

What a scheduler may do, in any order and as badly as possible: freed blocks are handed out again at once or late,
victims leave while their step is in flight, requests end while their prefetch runs, host blocks change owner.
Each token is a number of its own, so that a kernel that reads wrong bytes notices.
"""

import random
from collections.abc import Iterable
from dataclasses import dataclass, field

from pipemax.domain.units import GpuBlockId, HostBlockId, ceil_div
from pipemax.transfer.commands import BlockPrefetch, BlockStore, StepCopies, TokenStore
from pipemax.transfer.store_fences import CopyFences

BLOCK_TOKENS = 4


@dataclass
class KvSequence:
    """One request."""

    id: int
    num_tokens: int = 0
    gpu_blocks: list[GpuBlockId] = field(default_factory=list)
    host_blocks: list[HostBlockId] = field(default_factory=list)
    saved_tokens: int = 0
    """On the host."""
    is_resident: bool = True
    ready_step: int = 0
    num_prefetched: int = 0
    """Blocks that were asked for, of one that comes back in parts."""
    is_prefetching: bool = False
    is_leaving: bool = False
    """Overwritten by the last step's wave: only what that step wrote is still there."""


@dataclass(frozen=True)
class Run:
    """What a step computes for one sequence: reads all its tokens, writes ``[first_token, end_token)``."""

    sequence_id: int
    gpu_blocks: tuple[GpuBlockId, ...]
    first_token: int
    end_token: int
    owners: tuple[int, ...]
    """By token, the sequence that computed it: prefixes are shared."""


@dataclass(frozen=True)
class Step:
    copies: StepCopies
    runs: tuple[Run, ...]


class RandomSchedule:
    """``writes_through``: partly filled blocks are stored token by token, else saved when their owner is evicted.

    ``has_waves``: some steps compute in groups of layers, and most of those overwrite what they have computed.
    """

    def __init__(
        self,
        rng: random.Random,
        *,
        gpu_blocks: int,
        host_blocks: int,
        writes_through: bool,
        has_waves: bool = False,
    ) -> None:
        self._rng = rng
        self._has_waves = has_waves
        self._writes_through = writes_through
        self._reuses_at_once = rng.random() < 0.5
        self._free_gpu = [GpuBlockId(block) for block in range(gpu_blocks)]
        self._free_host = [HostBlockId(block) for block in range(host_blocks)]
        self._num_holders: dict[GpuBlockId, int] = {}
        self._sequences: list[KvSequence] = []
        self._owners: dict[int, list[int]] = {}
        self._fences = CopyFences()
        self._next_id = 1
        self._step = -1
        self._abandons_prefetches = False
        self.num_evicted = self.num_prefetched = self.num_aborted_prefetching = 0
        self.num_prefetched_in_parts = self.num_abandoned = self.num_overwritten = 0
        self.num_prefetched_by_waves = 0

    def next_step(self) -> Step:
        self._step += 1
        self._abandons_prefetches = False
        self._end_some()
        saves = self._free_what_waves_left() + self._evict_some()
        prefetches, later_prefetches = self._prefetch_some()
        runs, overwrites, stores, token_stores = [], [], [], []
        victims: list[tuple[KvSequence, int]] = []
        running = [s for s in self._sequences if self._can_run(s)]
        running = [s for s in running if self._rng.random() < 0.6] + self._admit_some()
        for sequence in running:
            num_new = self._rng.randint(1, 6) if sequence.num_tokens == 0 else 1
            if not self._grow(sequence, num_new):
                if not sequence.host_blocks:  # admitted in vain
                    self._end(sequence)
                continue
            first, end = sequence.num_tokens, sequence.num_tokens + num_new
            num_whole = first // BLOCK_TOKENS
            if num_whole and sequence.saved_tokens >= num_whole * BLOCK_TOKENS:
                victims.append((sequence, num_whole))
            self._owners[sequence.id] += [sequence.id] * num_new
            runs.append(
                Run(sequence.id, tuple(sequence.gpu_blocks), first, end, tuple(self._owners[sequence.id]))
            )
            overwrites += sequence.gpu_blocks[ceil_div(first, BLOCK_TOKENS) : ceil_div(end, BLOCK_TOKENS)]
            sequence.num_tokens = end
            blocks, tokens = self._replicate(sequence)
            stores += blocks
            token_stores += tokens
        in_groups = self._has_waves and self._rng.random() < 0.8
        wave = self._overwrite_some(victims) if in_groups else []
        store_fence, prefetch_fence = self._fences.plan_step(
            overwrites=overwrites,
            saves=saves,
            prefetches=[*prefetches, *later_prefetches, *wave],
            stores=stores,
            token_stores=token_stores,
        )
        copies = StepCopies(
            saves=tuple(saves),
            prefetches=tuple(prefetches),
            later_prefetches=tuple(later_prefetches),
            wave_prefetches=tuple(wave),
            in_groups=in_groups,
            abandons_prefetches=self._abandons_prefetches,
            stores=tuple(stores),
            token_stores=tuple(token_stores),
            store_fence=store_fence,
            prefetch_fence=prefetch_fence,
        )
        return Step(copies, tuple(runs))

    # -- who comes and goes ---------------------------------------------------------------------------------------

    def _end_some(self) -> None:
        for sequence in list(self._sequences):
            if self._rng.random() < 0.06:
                self.num_aborted_prefetching += 0 < sequence.ready_step == self._step
                self._end(sequence)

    def _end(self, sequence: KvSequence) -> None:
        self._stop_prefetching(sequence)
        self._release(sequence.gpu_blocks)
        self._free_host += sequence.host_blocks
        self._sequences.remove(sequence)

    def _admit_some(self) -> list[KvSequence]:
        admitted = []
        for _ in range(self._rng.randint(0, 2)):
            sequence = KvSequence(self._next_id)
            self._next_id += 1
            self._owners[sequence.id] = []
            self._share_prefix(sequence)
            self._sequences.append(sequence)
            admitted.append(sequence)
        return admitted

    def _share_prefix(self, sequence: KvSequence) -> None:
        donors = [s for s in self._sequences if self._can_run(s)]
        if not donors or self._rng.random() < 0.6:
            return
        donor = self._rng.choice(donors)
        num_blocks = donor.num_tokens // BLOCK_TOKENS
        if num_blocks == 0 or len(self._free_host) < num_blocks:
            return
        sequence.gpu_blocks = donor.gpu_blocks[:num_blocks]
        for block in sequence.gpu_blocks:
            self._num_holders[block] += 1
        sequence.num_tokens = num_blocks * BLOCK_TOKENS
        self._owners[sequence.id] = self._owners[donor.id][: sequence.num_tokens]

    def _evict_some(self) -> list[BlockStore]:
        saves = []
        for sequence in self._sequences:
            if not sequence.is_resident or self._rng.random() > 0.25:
                continue
            self._stop_prefetching(sequence)
            if sequence.saved_tokens < sequence.num_tokens:
                saves.append(
                    BlockStore(source=self._last_gpu_block(sequence), target=sequence.host_blocks[-1])
                )
                sequence.saved_tokens = sequence.num_tokens
            self._release(sequence.gpu_blocks)
            sequence.gpu_blocks = []
            sequence.is_resident = False
            self.num_evicted += 1
        return saves

    def _overwrite_some(self, victims: list[tuple[KvSequence, int]]) -> list[BlockPrefetch]:
        """Evict running sequences but for the blocks that this step writes to; prefetch others in their place."""
        for sequence, num_whole in victims:
            if self._rng.random() < 0.5:
                self._release(sequence.gpu_blocks[:num_whole])
                sequence.gpu_blocks = sequence.gpu_blocks[num_whole:]
                sequence.is_resident, sequence.is_leaving = False, True
                self.num_overwritten += 1
        prefetches = []
        for sequence in self._sequences:
            is_parked = not (sequence.is_resident or sequence.is_prefetching or sequence.is_leaving)
            if is_parked and (blocks := self._take_gpu(len(sequence.host_blocks))) is not None:
                sequence.gpu_blocks, sequence.is_resident = blocks, True
                sequence.ready_step = self._step + 1
                self.num_prefetched_by_waves += 1
                prefetches += map(BlockPrefetch, sequence.host_blocks, blocks)
        return prefetches

    def _free_what_waves_left(self) -> list[BlockStore]:
        saves = []
        for sequence in self._sequences:
            if sequence.is_leaving:
                if sequence.saved_tokens < sequence.num_tokens:
                    saves.append(BlockStore(source=sequence.gpu_blocks[-1], target=sequence.host_blocks[-1]))
                    sequence.saved_tokens = sequence.num_tokens
                self._release(sequence.gpu_blocks)
                sequence.gpu_blocks, sequence.is_leaving = [], False
        return saves

    def _prefetch_some(self) -> tuple[list[BlockPrefetch], list[BlockPrefetch]]:
        """For the next step, and for later ones: some come back whole, some in parts."""
        prefetches, later_prefetches = [], []
        for sequence in self._sequences:
            if sequence.is_prefetching or (not sequence.is_resident and self._rng.random() < 0.5):
                part, is_last = self._prefetch_part(sequence)
                (prefetches if is_last else later_prefetches).extend(part)
        return prefetches, later_prefetches

    def _prefetch_part(self, sequence: KvSequence) -> tuple[list[BlockPrefetch], bool]:
        if not sequence.is_prefetching:
            blocks = self._take_gpu(len(sequence.host_blocks))
            if blocks is None:
                return [], True
            sequence.gpu_blocks, sequence.is_resident = blocks, True
            sequence.is_prefetching, sequence.num_prefetched = True, 0
            self.num_prefetched += 1
        rest = [*zip(sequence.host_blocks, sequence.gpu_blocks, strict=True)][sequence.num_prefetched :]
        part = rest if self._rng.random() < 0.6 else rest[: self._rng.randint(0, len(rest))]
        is_last = len(part) == len(rest)
        sequence.num_prefetched += len(part)
        sequence.is_prefetching = not is_last
        sequence.ready_step = self._step + 1
        self.num_prefetched_in_parts += not is_last
        return [BlockPrefetch(source=host, target=gpu) for host, gpu in part], is_last

    def _stop_prefetching(self, sequence: KvSequence) -> None:
        self._abandons_prefetches |= sequence.is_prefetching
        self.num_abandoned += sequence.is_prefetching
        sequence.is_prefetching = False

    def _can_run(self, sequence: KvSequence) -> bool:
        return sequence.is_resident and not sequence.is_prefetching and sequence.ready_step <= self._step

    # -- blocks ---------------------------------------------------------------------------------------------------

    def _grow(self, sequence: KvSequence, num_new: int) -> bool:
        """GPU and host blocks for its new tokens; all or nothing."""
        num_blocks = ceil_div(sequence.num_tokens + num_new, BLOCK_TOKENS)
        num_host = num_blocks - len(sequence.host_blocks)
        if len(self._free_host) < num_host:
            return False
        blocks = self._take_gpu(num_blocks - len(sequence.gpu_blocks))
        if blocks is None:
            return False
        sequence.gpu_blocks += blocks
        sequence.host_blocks += [self._take(self._free_host) for _ in range(num_host)]
        return True

    def _replicate(self, sequence: KvSequence) -> tuple[list[BlockStore], list[TokenStore]]:
        stores, token_stores = [], []
        first, end = sequence.saved_tokens, sequence.num_tokens
        for index in range(first // BLOCK_TOKENS, ceil_div(end, BLOCK_TOKENS)):
            source, target = sequence.gpu_blocks[index], sequence.host_blocks[index]
            begin_slot = max(0, first - index * BLOCK_TOKENS)
            end_slot = min(BLOCK_TOKENS, end - index * BLOCK_TOKENS)
            is_full = end_slot == BLOCK_TOKENS
            if is_full and (begin_slot == 0 or not self._writes_through):
                stores.append(BlockStore(source=source, target=target))
            elif self._writes_through:
                token_stores.append(
                    TokenStore(
                        source=source, target=target, first_slot=begin_slot, num_slots=end_slot - begin_slot
                    )
                )
        full = end if self._writes_through else end // BLOCK_TOKENS * BLOCK_TOKENS
        sequence.saved_tokens = max(first, full)
        return stores, token_stores

    def _last_gpu_block(self, sequence: KvSequence) -> GpuBlockId:
        return sequence.gpu_blocks[ceil_div(sequence.num_tokens, BLOCK_TOKENS) - 1]

    def _take_gpu(self, num_blocks: int) -> list[GpuBlockId] | None:
        if num_blocks > len(self._free_gpu):
            return None
        blocks = [self._take(self._free_gpu) for _ in range(num_blocks)]
        for block in blocks:
            self._num_holders[block] = 1
        return blocks

    def _take(self, free: list) -> int:
        return free.pop() if self._reuses_at_once else free.pop(0)

    def _release(self, blocks: Iterable[GpuBlockId]) -> None:
        for block in blocks:
            self._num_holders[block] -= 1
            if self._num_holders[block] == 0:
                self._free_gpu.append(block)
