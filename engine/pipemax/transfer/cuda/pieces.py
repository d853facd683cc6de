"""Submit prefetches in pieces between which the copy engine is free for other streams, for activations above all.

A copy engine goes on with one stream as long as that stream has copies that may run, whatever the priorities: an
activation that a stage receives by the copy engine would wait for all prefetches that were submitted before it.
Smaller calls on one stream change nothing, nor does a second call behind the one under way (measured on an H100,
``docs/results/gpu.md``). So a piece may run only after a mark on another stream, which comes behind the piece before
(``CopyDevice.give_way``): until then the engine has no prefetch to run and takes what waits.

    prefetch    | piece 0 | ~ | piece 1 | ~ ············ | piece 2 |         ~ the lane gives way
    activation                            | activation |

The device paces the pieces, not the host. A host that submitted each piece when the one before has ended would have to
hold back the mark behind the last piece, for which the next step waits; that step is mostly submitted before the first
piece may run.
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from pipemax.transfer.cuda.copy_runs import CopyRuns
from pipemax.transfer.cuda.device import Copy, CopyDevice, Lane, Pool, Span

PIECE_S = 1e-3
"""How long a piece may occupy the link, and so how long an activation waits for one."""

_TIMED_RUNS = 3


def submit_pieces(device: CopyDevice, runs: CopyRuns, max_bytes: int) -> None:
    """Enqueue prefetches on their lane in pieces of at most ``max_bytes``, in the order of ``runs``."""
    for piece in cut(runs, max_bytes):
        device.give_way(Lane.PREFETCH)
        device.copy(Lane.PREFETCH, piece)


def cut(runs: CopyRuns, max_bytes: int) -> Iterator[CopyRuns]:
    """Yield the same copies in batches of at most ``max_bytes``; a longer copy is cut."""
    short = _cut_copies(runs, max_bytes)
    ends = np.cumsum(short.sizes)
    first = 0
    while first < len(short):
        begin = ends[first] - short.sizes[first]
        end = int(np.searchsorted(ends, begin + max_bytes, side="right"))
        yield _selected(short, np.arange(first, end))
        first = end


def measure_bytes_per_s(device: CopyDevice, num_bytes: int) -> float:
    """Return the rate at which the first ``num_bytes`` of the host pool go to those of the GPU pool: best of three.

    The lane must be idle; what the GPU pool held there is lost. Waits for the copies.
    """
    spans = (Span(Pool.HOST, 0, num_bytes), Span(Pool.GPU, 0, num_bytes))
    seconds = []
    for _ in range(_TIMED_RUNS):
        begin = device.record(Lane.PREFETCH)
        device.copy(Lane.PREFETCH, [Copy(*spans)])
        end = device.record(Lane.PREFETCH)
        device.synchronize()
        seconds.append(device.elapsed_s(begin, end))
    return num_bytes / min(seconds)


def _cut_copies(runs: CopyRuns, max_bytes: int) -> CopyRuns:
    counts = -(-runs.sizes // max_bytes)
    parts = _selected(runs, np.repeat(np.arange(len(runs)), counts))
    places = np.arange(len(parts)) - np.repeat(np.cumsum(counts) - counts, counts)
    offsets = places * max_bytes
    return replace(
        parts,
        source_bytes=parts.source_bytes + offsets,
        target_bytes=parts.target_bytes + offsets,
        sizes=np.minimum(parts.sizes - offsets, max_bytes),
    )


def _selected(runs: CopyRuns, indices: np.ndarray) -> CopyRuns:
    return replace(
        runs,
        source_bytes=runs.source_bytes[indices],
        target_bytes=runs.target_bytes[indices],
        sizes=runs.sizes[indices],
    )
