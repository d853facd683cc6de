"""Turn a step's block copies into few contiguous copies, for one submission. It knows no steps.

It runs between two steps of the model, hence numpy: a thousand blocks take about half a millisecond.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipemax.transfer.cuda.device import Copy, Lane, Pool, Span
from pipemax.transfer.layout import LayerSpan

Int64s = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CopyRuns(Iterable[Copy]):
    """Copies from one pool to another, in arrays of equal length."""

    source: Pool
    target: Pool
    source_bytes: Int64s
    """Each copy's first byte in its pool."""
    target_bytes: Int64s
    sizes: Int64s

    def __len__(self) -> int:
        return len(self.sizes)

    def __iter__(self) -> Iterator[Copy]:
        columns = (self.source_bytes.tolist(), self.target_bytes.tolist(), self.sizes.tolist())
        for source_byte, target_byte, size in zip(*columns, strict=True):
            yield Copy(Span(self.source, source_byte, size), Span(self.target, target_byte, size))


def copy_runs(pairs: Sequence[tuple[int, int]], *, lane: Lane, block_bytes: int) -> CopyRuns:
    """Join whole-block copies in the direction of ``lane``: blocks that are neighbours on both sides are one copy.

    ``pairs``: (source block, target block), the targets distinct. The copies are ordered by source.
    """
    blocks = _by_source(pairs)
    is_adjacent = (np.diff(blocks, axis=0) == 1).all(axis=1)
    begins = np.flatnonzero(np.r_[True, ~is_adjacent][: len(blocks)])
    sizes = np.diff(begins, append=len(blocks)) * block_bytes
    return _runs(blocks[begins] * block_bytes, sizes, lane)


def part_copies(
    pairs: Sequence[tuple[int, int]], part: LayerSpan, *, lane: Lane, block_bytes: int
) -> CopyRuns:
    """Copy the same part of each block, for the rest as in ``copy_runs``; parts of neighbours are no neighbours."""
    firsts = _by_source(pairs) * block_bytes + part.first_byte
    return _runs(firsts, np.full(len(firsts), part.num_bytes, dtype=np.int64), lane)


def _by_source(pairs: Sequence[tuple[int, int]]) -> Int64s:
    blocks = np.array(pairs, dtype=np.int64).reshape(-1, 2)
    return blocks[np.argsort(blocks[:, 0], kind="stable")]


def _runs(firsts: Int64s, sizes: Int64s, lane: Lane) -> CopyRuns:
    """``firsts``: (source byte, target byte) of each copy."""
    source, target = (Pool.HOST, Pool.GPU) if lane is Lane.PREFETCH else (Pool.GPU, Pool.HOST)
    return CopyRuns(
        source=source, target=target, source_bytes=firsts[:, 0], target_bytes=firsts[:, 1], sizes=sizes
    )
