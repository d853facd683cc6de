"""The copies of one step, as plain data in block ids. The scheduler makes them; every stage carries out the same.

A step may hold thousands of them and is pickled to every stage, hence ``CopyRows``: an array instead of tuples.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from pipemax.domain.plan import StepId
from pipemax.domain.units import GpuBlockId, HostBlockId

Int32s = NDArray[np.int32]
Row = TypeVar("Row", bound=tuple[int, ...])


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


class CopyRows(Sequence[Row]):
    """Copies of one kind as an array with a row for each; ``np.asarray`` takes them without a copy."""

    __slots__ = ("_kind", "table")

    def __init__(self, kind: type[Row], table: Int32s) -> None:
        """Keep ``table``, int32 of shape ``(num_copies, fields of kind)``, which must not change any more."""
        self._kind = kind
        self.table = table

    def __len__(self) -> int:
        return len(self.table)

    def __iter__(self) -> Iterator[Row]:
        return (self._kind(*row) for row in self.table.tolist())

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> "CopyRows[Row]": ...
    def __getitem__(self, index: int | slice) -> "Row | CopyRows[Row]":
        if isinstance(index, slice):
            return CopyRows(self._kind, self.table[index])
        return self._kind(*self.table[index].tolist())

    def joined(self, others: "CopyRows[Row]") -> "CopyRows[Row]":
        return CopyRows(self._kind, np.concatenate([self.table, others.table])) if len(others) else self

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        return np.array(self.table, dtype=dtype, copy=copy)

    def __reduce__(self) -> tuple[Any, ...]:
        return CopyRows, (self._kind, self.table)

    def __repr__(self) -> str:
        return repr(tuple(self))


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCopies:
    """The copies of one step."""

    step_id: StepId | None = None
    """The step that is told the times of its prefetches; None for copies that belong to no step, as a check makes."""
    saves: Sequence[BlockStore] = ()
    """Made before it computes: KV that earlier steps wrote to blocks that this step may overwrite."""
    prefetches: Sequence[BlockPrefetch] = ()
    """Made while it computes: prefetches that the next step may read."""
    later_prefetches: Sequence[BlockPrefetch] = ()
    """Made while it computes, behind ``prefetches``: parts of longer prefetches, read by the next step but one at the
    earliest."""
    wave_prefetches: Sequence[BlockPrefetch] = ()
    """Made behind its computation, group of layers by group of layers: prefetches that the next step may read, into
    blocks that this step reads and does not write to. Only of a step that computes in groups."""
    in_groups: bool = False
    """Whether it computes group of layers by group of layers, and tells so. It then waits for each group's copies of
    earlier waves when it begins that group; any other step waits for all of them when it begins."""
    abandons_prefetches: bool = False
    """A request that was prefetched in part has ended or left. Others may use its blocks from this step on, so the step
    must wait for all earlier prefetches."""
    stores: Sequence[BlockStore] = ()
    """Made once it has computed: the blocks that it filled."""
    token_stores: Sequence[TokenStore] = ()
    """Made once it has computed: what it wrote to blocks that it did not fill."""
    store_fence: int | None = 0
    """How many steps ago stores or saves last read a block that this step's computation overwrites; 0 is this step
    itself, None is no step. This step must wait for all stores up to that one."""
    prefetch_fence: int | None = 0
    """How many steps ago stores or saves last used a block, of either pool, that this step's prefetches touch; 0 is
    this step's saves, None is no step. The prefetches, those of a wave among them, must wait for all stores up to that
    step."""

    @property
    def num_prefetches(self) -> int:
        """The number of prefetches that start with the step's computation, not behind it."""
        return len(self.prefetches) + len(self.later_prefetches)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefetchTiming:
    """The time that one step's prefetches took on one stage."""

    step_id: StepId | None
    """As in its ``StepCopies``."""
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
    """One worker's copies since its start; added up, those of several."""

    loaded_bytes: int = 0
    """Host → GPU."""
    stored_bytes: int = 0
    """GPU → host."""

    def __add__(self, other: "CopyCounts") -> "CopyCounts":
        return CopyCounts(
            loaded_bytes=self.loaded_bytes + other.loaded_bytes,
            stored_bytes=self.stored_bytes + other.stored_bytes,
        )
