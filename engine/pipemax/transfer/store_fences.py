"""Find the stores that a step, or its prefetches, must wait for: those that still use a block that these touch.

Stores run while later steps compute. Blocks freed while a store reads them are mostly reused much later, because free
blocks are taken oldest first; so a step that waited for all stores before it would mostly wait for no reason. The
scheduler makes the fences, since workers do not know what a step writes. Steps are counted here; not thread-safe.
"""

from collections.abc import Iterable, Sequence
from itertools import repeat

import numpy as np

from pipemax.domain.units import GpuBlockId
from pipemax.transfer.commands import BlockPrefetch, BlockStore, TokenStore


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


class StoreFences:
    """Remembers the last store that read each GPU block."""

    def __init__(self) -> None:
        self._moments = _Moments()
        self._last_stored: dict[int, int] = {}

    def plan_step(
        self,
        *,
        overwrites: Iterable[GpuBlockId],
        saves: Sequence[BlockStore],
        stores: Sequence[BlockStore],
        token_stores: Sequence[TokenStore] = (),
    ) -> int | None:
        """Return the next step's ``StepCopies.store_fence``.

        ``overwrites``: the blocks that its computation writes from their first slot on. A block that it
        continues to fill is not among them: stores read other slots of it.
        """
        now = self._moments.saves
        self._last_stored.update(dict.fromkeys(_column(saves, 0), now))
        last = max((self._last_stored.pop(block, -1) for block in overwrites), default=-1)
        for later in (stores, token_stores):
            self._last_stored.update(dict.fromkeys(_column(later, 0), now + 1))
        return self._moments.end_step(last)


class PrefetchFences:
    """Remembers the last store that used each block of either pool."""

    MAX_BLOCKS = 1 << 18
    """Blocks remembered; beyond it, the next prefetches wait for all stores before them, and all are forgotten."""

    def __init__(self) -> None:
        self._moments = _Moments()
        self._last_read: dict[int, int] = {}  # by GPU block
        self._last_written: dict[int, int] = {}  # by host block

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
        last = -1
        if prefetches and len(self._last_written) > self.MAX_BLOCKS:
            last = now
            self._last_read.clear()
            self._last_written.clear()
        elif prefetches:
            sources, targets = _column(prefetches, 0), _column(prefetches, 1)
            last = max(
                max(map(self._last_written.get, sources, repeat(-1))),
                max(map(self._last_read.get, targets, repeat(-1))),
            )
        self._remember(stores, now + 1)
        self._remember(token_stores, now + 1)
        return self._moments.end_step(last)

    def _remember(self, stores: Sequence[BlockStore] | Sequence[TokenStore], moment: int) -> None:
        self._last_read.update(dict.fromkeys(_column(stores, 0), moment))
        self._last_written.update(dict.fromkeys(_column(stores, 1), moment))


def _column(copies: Sequence[tuple[int, ...]], column: int) -> list[int]:
    if not copies:
        return []
    blocks: list[int] = np.asarray(copies, dtype=np.int32)[:, column].tolist()
    return blocks
