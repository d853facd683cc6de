"""Block copies of a step as few contiguous copies, cut into chunks that can be submitted one at a time.

A copy engine works through what was submitted in the order in which it becomes ready, and ignores priorities: what
must be able to overtake has to wait outside, in pieces (``queue``). Knows block ids and bytes, nothing of steps.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from pipemax.transfer.cuda.device import Copy, KernelCall, Lane, Pool, Span


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """What is submitted at once."""

    lane: Lane
    work: tuple[Copy, ...] | KernelCall
    num_bytes: int


def coalesce(pairs: Iterable[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """``(source block, target block)`` pairs as runs ``(source, target, number of blocks)``, ordered by source.

    Neighbours are joined where both sides are adjacent. Targets are distinct, so the order does not matter.
    """
    ordered = sorted(pairs)
    if not ordered:
        return []
    begins = [0]
    for index, (before, pair) in enumerate(pairwise(ordered), start=1):
        if pair != (before[0] + 1, before[1] + 1):
            begins.append(index)
    return [(*ordered[begin], end - begin) for begin, end in pairwise([*begins, len(ordered)])]


def copy_chunks(
    pairs: Sequence[tuple[int, int]], *, lane: Lane, block_bytes: int, chunk_bytes: int
) -> list[Chunk]:
    """Whole-block copies in the direction of ``lane``, in chunks of at most ``chunk_bytes``, or one block if that is
    longer.
    """
    source, target = (Pool.HOST, Pool.GPU) if lane is Lane.LOAD else (Pool.GPU, Pool.HOST)
    limit = max(1, chunk_bytes // block_bytes)
    chunks: list[Chunk] = []
    for runs in _grouped(coalesce(pairs), limit):
        copies = tuple(
            Copy(
                Span(source, first_source * block_bytes, num_blocks * block_bytes),
                Span(target, first_target * block_bytes, num_blocks * block_bytes),
            )
            for first_source, first_target, num_blocks in runs
        )
        num_bytes = sum(copy.source.num_bytes for copy in copies)
        chunks.append(Chunk(lane=lane, work=copies, num_bytes=num_bytes))
    return chunks


def _grouped(runs: Iterable[tuple[int, int, int]], limit: int) -> Iterator[list[tuple[int, int, int]]]:
    """Runs, cut where necessary, in groups of ``limit`` blocks; only the last may have fewer."""
    group: list[tuple[int, int, int]] = []
    room = limit
    for source, target, num_blocks in runs:
        begin = 0
        while begin < num_blocks:
            taken = min(room, num_blocks - begin)
            group.append((source + begin, target + begin, taken))
            begin += taken
            room -= taken
            if room == 0:
                yield group
                group, room = [], limit
    if group:
        yield group
