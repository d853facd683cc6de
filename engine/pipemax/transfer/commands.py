"""The copies of one step, as plain data in block ids. The scheduler makes them; every stage carries out the same.

A step may hold thousands of them and is pickled to every stage, hence tuples.
"""

from dataclasses import dataclass
from typing import NamedTuple

from pipemax.domain.units import GpuBlockId, HostBlockId


class BlockPrefetch(NamedTuple):
    """A copy host → GPU of one whole block."""

    source: HostBlockId
    target: GpuBlockId


class BlockStore(NamedTuple):
    """A copy GPU → host of one whole block: only the attention kernel knows how tokens lie within it."""

    source: GpuBlockId
    target: HostBlockId


class TokenStore(NamedTuple):
    """A copy GPU → host of some tokens of a block, to the same slots, for kernels that keep a block's tokens apart."""

    source: GpuBlockId
    target: HostBlockId
    first_slot: int
    num_slots: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCopies:
    """The copies of one step."""

    saves: tuple[BlockStore, ...] = ()
    """Made before it computes: KV that earlier steps wrote to blocks that this step may overwrite."""
    prefetches: tuple[BlockPrefetch, ...] = ()
    """Made while it computes: prefetches that the next step may read."""
    later_prefetches: tuple[BlockPrefetch, ...] = ()
    """Made while it computes, behind ``prefetches``: parts of longer prefetches, read by the next step but one at the
    earliest."""
    abandons_prefetches: bool = False
    """A request that was prefetched in part has ended or left. Others may use its blocks from this step on, so the step
    must wait for all earlier prefetches."""
    stores: tuple[BlockStore, ...] = ()
    """Made once it has computed: the blocks that it filled."""
    token_stores: tuple[TokenStore, ...] = ()
    """Made once it has computed: what it wrote to blocks that it did not fill."""
    store_fence: int | None = 0
    """How many steps ago stores or saves last read a block that this step's computation overwrites; 0 is this step
    itself, None is no step. This step must wait for all stores up to that one."""

    @property
    def num_prefetches(self) -> int:
        return len(self.prefetches) + len(self.later_prefetches)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefetchTiming:
    """The time that one step's prefetches took on one stage."""

    num_blocks: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWait:
    """The stalls and the times of earlier prefetches that are known when a step begins."""

    stall_s: float
    """How long steps waited for earlier copies and their own saves. On a GPU, for steps that are done since."""
    prefetches: tuple[PrefetchTiming, ...]
    """Prefetches of earlier steps, in order, each once its time is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyCounts:
    """One stage's copies since its start."""

    loaded_bytes: int = 0
    """Host → GPU."""
    stored_bytes: int = 0
    """GPU → host."""
    packed_bytes: int = 0
    """The part of them that left layer by layer and was put into blocks by the CPU."""
