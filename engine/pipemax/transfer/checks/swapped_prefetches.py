"""Prefetch wrong blocks on purpose: a comparison of tokens that does not see this fault sees nothing.

Each of a step's prefetches takes the source of the one behind it, and the last the source of the first.
"""

from collections.abc import Sequence
from dataclasses import replace

from pipemax.transfer.backend import StepTransfers
from pipemax.transfer.commands import BlockPrefetch, CopyCounts, StepCopies, StepWait


class SwappedPrefetches:
    """Implements ``StepTransfers`` over another one."""

    def __init__(self, inner: StepTransfers) -> None:
        self._inner = inner

    @property
    def counts(self) -> CopyCounts:
        return self._inner.counts

    def begin_step(self, copies: StepCopies) -> StepWait:
        return self._inner.begin_step(copies)

    def start_prefetches(self, copies: StepCopies) -> None:
        self._inner.start_prefetches(replace(copies, prefetches=_swapped(copies.prefetches)))

    def begin_group(self, group: int) -> None:
        self._inner.begin_group(group)

    def end_group(self, copies: StepCopies, group: int) -> None:
        self._inner.end_group(replace(copies, wave_prefetches=_swapped(copies.wave_prefetches)), group)

    def end_step(self, copies: StepCopies) -> None:
        self._inner.end_step(copies)

    def close(self) -> None:
        self._inner.close()


def _swapped(prefetches: Sequence[BlockPrefetch]) -> tuple[BlockPrefetch, ...]:
    sources = [prefetch.source for prefetch in prefetches]
    pairs = zip(sources[1:] + sources[:1], prefetches, strict=True)
    return tuple(BlockPrefetch(source, prefetch.target) for source, prefetch in pairs)
