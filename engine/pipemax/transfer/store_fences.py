"""Find the stores that a step, or its prefetches, must wait for: those that still use a block that these touch.

Stores run while later steps compute. Blocks freed while a store reads them are mostly reused much later, because free
blocks are taken oldest first; so a step that waited for all stores before it would mostly wait for no reason. The
scheduler makes the fences, since workers do not know what a step writes. Steps are counted here; not thread-safe.
"""

from collections.abc import Sequence

import numpy as np

from pipemax.domain.units import GpuBlockId
from pipemax.transfer.commands import BlockPrefetch, BlockStore, Int32s, TokenStore


class _Moments:
    """Counts half steps, ``2 · step`` for a step's saves and ``2 · step + 1`` for its stores, and what is fenced."""

    def __init__(self) -> None:
        self._step = 0
        self._fenced = -1

    @property
    def saves(self) -> int:
        """The moment of the present step's saves; its stores are one later."""
        return 2 * self._step

    def end_step(self, last: int) -> int | None:
        """Return the step's fence, if it must wait for the moment ``last`` (-1: for none); go on to the next step.

        None where an earlier fence has waited for that already.
        """
        fence = None
        if last > self._fenced:
            fence = self._step - last // 2
            self._fenced = self.saves if fence == 0 else last | 1
        self._step += 1
        return fence


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


class StoreFences:
    """Remembers the last store that read each GPU block."""

    def __init__(self) -> None:
        self._moments = _Moments()
        self._last_stored = _LastUses()

    def plan_step(
        self,
        *,
        overwrites: Sequence[GpuBlockId],
        saves: Sequence[BlockStore],
        stores: Sequence[BlockStore],
        token_stores: Sequence[TokenStore] = (),
    ) -> int | None:
        """Return the next step's ``StepCopies.store_fence``.

        ``overwrites``: the blocks that its computation writes from their first slot on. A block that it
        continues to fill is not among them: stores read other slots of it.
        """
        now = self._moments.saves
        self._last_stored.note(_column(saves, 0), now)
        last = self._last_stored.latest(np.asarray(overwrites, dtype=np.int32))
        self._last_stored.note(_column(stores, 0), now + 1)
        self._last_stored.note(_column(token_stores, 0), now + 1)
        return self._moments.end_step(last)


class PrefetchFences:
    """Remembers the last store that used each block of either pool."""

    def __init__(self) -> None:
        self._moments = _Moments()
        self._last_read = _LastUses()  # of the GPU's blocks
        self._last_written = _LastUses()  # of the host's blocks

    def plan_step(
        self,
        *,
        saves: Sequence[BlockStore],
        prefetches: Sequence[BlockPrefetch],
        stores: Sequence[BlockStore],
        token_stores: Sequence[TokenStore] = (),
    ) -> int | None:
        """Return the next step's ``StepCopies.prefetch_fence``: its prefetches come before its stores."""
        now = self._moments.saves
        self._remember(saves, now)
        last = max(
            self._last_written.latest(_column(prefetches, 0)), self._last_read.latest(_column(prefetches, 1))
        )
        self._remember(stores, now + 1)
        self._remember(token_stores, now + 1)
        return self._moments.end_step(last)

    def _remember(self, stores: Sequence[BlockStore] | Sequence[TokenStore], moment: int) -> None:
        self._last_read.note(_column(stores, 0), moment)
        self._last_written.note(_column(stores, 1), moment)


def _column(copies: Sequence[tuple[int, ...]], column: int) -> Int32s:
    return np.asarray(copies, dtype=np.int32).reshape(len(copies), -1)[:, column] if copies else _NO_BLOCKS


_NO_BLOCKS = np.empty(0, dtype=np.int32)
