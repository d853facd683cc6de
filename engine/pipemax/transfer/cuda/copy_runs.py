"""Turn a step's block copies into few contiguous copies, for one submission. It knows no steps.

It runs between two steps of the model, hence numpy: a thousand blocks take about half a millisecond.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipemax.transfer.cuda.device import Copy, Lane, Pool, Span

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
    blocks = np.array(pairs, dtype=np.int64).reshape(-1, 2)
    blocks = blocks[np.argsort(blocks[:, 0], kind="stable")]
    is_adjacent = (np.diff(blocks, axis=0) == 1).all(axis=1)
    begins = np.flatnonzero(np.r_[True, ~is_adjacent][: len(blocks)])
    source, target = (Pool.HOST, Pool.GPU) if lane is Lane.PREFETCH else (Pool.GPU, Pool.HOST)
    return CopyRuns(
        source=source,
        target=target,
        source_bytes=blocks[begins, 0] * block_bytes,
        target_bytes=blocks[begins, 1] * block_bytes,
        sizes=np.diff(begins, append=len(blocks)) * block_bytes,
    )
