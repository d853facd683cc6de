"""Turn a step's block copies into few contiguous copies, in chunks that can be submitted one at a time.

A copy engine works through submitted copies in the order in which they become ready, and ignores priorities: copies
that others may overtake have to wait outside, in pieces (``chunk_queue``). This module knows block ids and bytes, but
no steps. It runs between two steps of the model, hence numpy: a thousand blocks take about half a millisecond.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipemax.transfer.cuda.device import Copy, KernelCall, Lane, Pool, Span

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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Chunk:
    """Work that is submitted at once."""

    lane: Lane
    work: CopyRuns | KernelCall
    num_bytes: int


def copy_chunks(
    pairs: Sequence[tuple[int, int]], *, lane: Lane, block_bytes: int, chunk_bytes: int
) -> list[Chunk]:
    """Cut whole-block copies in the direction of ``lane`` into chunks of at most ``chunk_bytes``.

    A block longer than that is a chunk by itself. ``pairs``: (source block, target block), the targets distinct. The
    copies are ordered by source; blocks that are neighbours on both sides are one copy.
    """
    blocks = np.array(pairs, dtype=np.int64).reshape(-1, 2)
    blocks = blocks[np.argsort(blocks[:, 0], kind="stable")]
    places, limit = np.arange(len(blocks)), max(1, chunk_bytes // block_bytes)
    is_adjacent = (np.diff(blocks, axis=0) == 1).all(axis=1)
    begins = np.flatnonzero(np.r_[True, ~is_adjacent][: len(blocks)] | (places % limit == 0))
    sizes = np.diff(begins, append=len(blocks)) * block_bytes
    firsts = blocks[begins] * block_bytes
    source, target = (Pool.HOST, Pool.GPU) if lane is Lane.PREFETCH else (Pool.GPU, Pool.HOST)
    chunks: list[Chunk] = []
    for begin in range(0, len(blocks), limit):
        part = slice(*np.searchsorted(begins, (begin, begin + limit)))
        runs = CopyRuns(
            source=source,
            target=target,
            source_bytes=firsts[part, 0],
            target_bytes=firsts[part, 1],
            sizes=sizes[part],
        )
        chunks.append(Chunk(lane=lane, work=runs, num_bytes=int(runs.sizes.sum())))
    return chunks
