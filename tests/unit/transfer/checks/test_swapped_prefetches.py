"""Prefetches of wrong blocks, made on purpose, change nothing else of a step."""

from pipemax.domain.units import GpuBlockId, HostBlockId
from pipemax.transfer.checks.swapped_prefetches import SwappedPrefetches
from pipemax.transfer.commands import BlockPrefetch, BlockStore, CopyCounts, StepCopies, StepWait


class Recording:
    """Implements ``StepTransfers`` and copies nothing."""

    def __init__(self) -> None:
        self.begun: list[StepCopies] = []
        self.started: list[StepCopies] = []
        self.ended: list[StepCopies] = []
        self.groups: list[int] = []

    @property
    def counts(self) -> CopyCounts:
        return CopyCounts()

    def begin_step(self, copies: StepCopies) -> StepWait:
        self.begun.append(copies)
        return StepWait(stall_s=0.0, prefetches=())

    def start_prefetches(self, copies: StepCopies) -> None:
        self.started.append(copies)

    def begin_group(self, group: int) -> None:
        self.groups.append(group)

    def end_group(self, copies: StepCopies, group: int) -> None:
        assert group == self.groups[-1]
        self.started.append(copies)

    def end_step(self, copies: StepCopies) -> None:
        self.ended.append(copies)

    def close(self) -> None:
        pass


def prefetches(*sources: int) -> tuple[BlockPrefetch, ...]:
    return tuple(BlockPrefetch(HostBlockId(source), GpuBlockId(7 + n)) for n, source in enumerate(sources))


def test_each_prefetch_takes_the_block_of_the_next() -> None:
    inner = Recording()
    swapped = SwappedPrefetches(inner)
    stores = (BlockStore(GpuBlockId(1), HostBlockId(2)),)
    copies = StepCopies(prefetches=prefetches(3, 4, 5), stores=stores, store_fence=None)
    swapped.begin_step(copies)
    swapped.start_prefetches(copies)
    swapped.end_step(copies)
    assert inner.started == [StepCopies(prefetches=prefetches(4, 5, 3), stores=stores, store_fence=None)]
    assert inner.begun == inner.ended == [copies]


def test_each_prefetch_of_a_wave_takes_the_block_of_the_next() -> None:
    inner = Recording()
    swapped = SwappedPrefetches(inner)
    copies = StepCopies(wave_prefetches=prefetches(3, 4, 5), in_groups=True)
    for group in range(2):
        swapped.begin_group(group)
        swapped.end_group(copies, group)
    assert inner.started == [StepCopies(wave_prefetches=prefetches(4, 5, 3), in_groups=True)] * 2
    assert inner.groups == [0, 1]


def test_a_step_without_prefetches_is_as_it_was() -> None:
    inner = Recording()
    SwappedPrefetches(inner).start_prefetches(StepCopies())
    assert inner.started == [StepCopies()]
