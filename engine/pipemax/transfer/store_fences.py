"""Find the stores that a step, or its prefetches, must wait for: those that still use a block that these touch.

Stores run while later steps compute. Blocks freed while a store reads them are mostly reused much later, because free
blocks are taken oldest first; so a step that waited for all stores before it would mostly wait for no reason. The
scheduler makes the fences, since workers do not know what a step writes. Steps are counted here; not thread-safe.
"""

from collections.abc import Sequence

import numpy as np

from pipemax.domain.units import GpuBlockId
from pipemax.transfer.commands import BlockPrefetch, BlockStore, Int32s, TokenStore


class _LastUses:
    """The moment at which each block of a pool was last used; -1 for never."""

    def __init__(self) -> None:
        self._moments = np.full(1024, -1, dtype=np.int64)

    def note(self, blocks: Int32s, moment: int) -> None:
        if not len(blocks):
            return
        largest = int(blocks.max())
        if largest >= len(self._moments):
            more = np.full(2 * largest + 1 - len(self._moments), -1, dtype=np.int64)
            self._moments = np.concatenate([self._moments, more])
        self._moments[blocks] = moment

    def latest(self, blocks: Int32s) -> int:
        """Return the last moment at which any of these blocks was used."""
        known = blocks[blocks < len(self._moments)]
        return int(self._moments[known].max(initial=-1))


class CopyFences:
    """Remembers the last store that used each block of either pool.

    It counts half steps, its moments: ``2 · step`` for a step's saves and ``2 · step + 1`` for its stores.
    """

    def __init__(self) -> None:
        self._step = 0
        self._last_read = _LastUses()  # of the GPU's blocks
        self._last_written = _LastUses()  # of the host's blocks
        self._fenced_by_steps = self._fenced_by_prefetches = -1  # the moments that were waited for

    def plan_step(
        self,
        *,
        overwrites: Sequence[GpuBlockId],
        saves: Sequence[BlockStore],
        prefetches: Sequence[BlockPrefetch],
        stores: Sequence[BlockStore],
        token_stores: Sequence[TokenStore] = (),
    ) -> tuple[int | None, int | None]:
        """Return the next step's ``StepCopies.store_fence`` and its ``prefetch_fence``.

        ``overwrites``: the blocks that its computation writes from their first slot on. A block that it
        continues to fill is not among them: stores read other slots of it. Its prefetches come before its stores.
        """
        now = 2 * self._step
        self._remember(saves, now)
        last_read = self._last_read.latest(np.asarray(overwrites, dtype=np.int32))
        last_used = max(
            self._last_written.latest(_column(prefetches, 0)), self._last_read.latest(_column(prefetches, 1))
        )
        self._remember(stores, now + 1)
        self._remember(token_stores, now + 1)
        store_fence, self._fenced_by_steps = self._fence(last_read, self._fenced_by_steps)
        prefetch_fence, self._fenced_by_prefetches = self._fence(last_used, self._fenced_by_prefetches)
        self._step += 1
        return store_fence, prefetch_fence

    def _fence(self, last: int, fenced: int) -> tuple[int | None, int]:
        """Return the fence of a step that must wait for the moment ``last`` (-1: for none), and what is fenced then.

        None where an earlier fence has waited for that already.
        """
        if last <= fenced:
            return None, fenced
        fence = self._step - last // 2
        return fence, 2 * self._step if fence == 0 else last | 1

    def _remember(self, stores: Sequence[BlockStore] | Sequence[TokenStore], moment: int) -> None:
        self._last_read.note(_column(stores, 0), moment)
        self._last_written.note(_column(stores, 1), moment)


def _column(copies: Sequence[tuple[int, ...]], column: int) -> Int32s:
    return np.asarray(copies, dtype=np.int32).reshape(len(copies), -1)[:, column] if copies else _NO_BLOCKS


_NO_BLOCKS = np.empty(0, dtype=np.int32)
