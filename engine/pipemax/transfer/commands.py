"""What one step copies, as plain data in block ids: made by the scheduler, carried out by every stage alike.

A step may hold thousands of these and is pickled to every stage: hence tuples.
"""

from dataclasses import dataclass
from typing import NamedTuple

from pipemax.domain.units import GpuBlockId, HostBlockId


class BlockPrefetch(NamedTuple):
    """Host → GPU, one whole block."""

    source: HostBlockId
    target: GpuBlockId


class BlockStore(NamedTuple):
    """GPU → host, one whole block: how tokens lie within it is the attention kernel's own affair."""

    source: GpuBlockId
    target: HostBlockId


class TokenStore(NamedTuple):
    """GPU → host, some tokens of one block, at the same slots of it. For kernels that keep a block's tokens apart."""

    source: GpuBlockId
    target: HostBlockId
    first_slot: int
    num_slots: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCopies:
    """The copies of one step."""

    saves: tuple[BlockStore, ...] = ()
    """Before it computes: what earlier steps wrote to blocks that this step may overwrite."""
    prefetches: tuple[BlockPrefetch, ...] = ()
    """While it computes: prefetches that the next step may read."""
    later_prefetches: tuple[BlockPrefetch, ...] = ()
    """Beside them, behind them: parts of prefetches that go on, so that no step before the next but one reads them."""
    abandons_prefetches: bool = False
    """A request has ended, or left, that was prefetched in part: its blocks may be anyone's from this step on, which
    must wait for all earlier prefetches."""
    stores: tuple[BlockStore, ...] = ()
    """Once it has computed: the blocks that it filled."""
    token_stores: tuple[TokenStore, ...] = ()
    """Once it has computed: what it wrote to blocks that it did not fill."""
    store_fence: int | None = 0
    """How many steps back the last one lies whose stores or saves read a block that this step's computation
    overwrites; 0 is this step itself, None is no step. It must wait for all stores up to that one."""

    @property
    def num_prefetches(self) -> int:
        return len(self.prefetches) + len(self.later_prefetches)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefetchTiming:
    """How long one step's prefetches took on one stage."""

    num_blocks: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWait:
    """What the beginning of a step found."""

    stall_s: float
    """How long steps had to wait for earlier copies and their own saves. On a GPU, of steps that are done since."""
    prefetches: tuple[PrefetchTiming, ...]
    """Of steps before it, in their order, each once it is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyCounts:
    """One stage's copies since its start."""

    loaded_bytes: int = 0
    """Host → GPU."""
    stored_bytes: int = 0
    """GPU → host."""
    packed_bytes: int = 0
    """Of them: layer by layer, and put into blocks by the CPU."""
    load_queue_s: float = 0.0
    """Waiting times of the prefetches' pieces until they were submitted, added up."""
    store_queue_s: float = 0.0
    num_chunks: int = 0
    """Pieces that were submitted."""
    num_late_chunks: int = 0
    """Of them: not before the next step began, for the copies took longer than their step."""
    num_held_chunks: int = 0
    """Of them: held back while the stage sent its activations."""
