"""What one step copies, as plain data in block ids: made by the scheduler, carried out by every stage alike.

A step may hold thousands of these and is pickled to every stage: hence tuples.
"""

from dataclasses import dataclass
from typing import NamedTuple

from pipemax.domain.units import GpuBlockId, HostBlockId


class BlockLoad(NamedTuple):
    """Host → GPU, one whole block."""

    source: HostBlockId
    target: GpuBlockId


class BlockStore(NamedTuple):
    """GPU → host: the token slots [first_slot, first_slot + num_slots) of one block."""

    source: GpuBlockId
    target: HostBlockId
    first_slot: int
    num_slots: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCopies:
    """The copies of one step. Loads may run while the step computes, stores once it has."""

    loads: tuple[BlockLoad, ...] = ()
    stores: tuple[BlockStore, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadTiming:
    """How long one step's loads took on one stage."""

    num_blocks: int
    seconds: float
