"""Find the stores that a step must wait for: those that still read a block that it overwrites.

Stores run while later steps compute. Blocks freed while a store reads them are mostly reused much later, because free
blocks are taken oldest first; so a step that waited for all stores before it would mostly wait for no reason. The
scheduler makes the fences, since workers do not know what a step writes. Steps are counted here; not thread-safe.
"""

from collections.abc import Iterable, Sequence

import numpy as np

from pipemax.domain.units import GpuBlockId
from pipemax.transfer.commands import BlockStore, TokenStore


class StoreFences:
    """Remembers the last store that read each GPU block.

    Moments are counted in half steps: ``2 · step`` are a step's saves, ``2 · step + 1`` its stores.
    """

    def __init__(self) -> None:
        self._step = 0
        self._fenced = -1
        self._last_stored: dict[GpuBlockId, int] = {}

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
        now = 2 * self._step
        self._last_stored.update(dict.fromkeys(_sources(saves), now))
        last = max((self._last_stored.pop(block, -1) for block in overwrites), default=-1)
        for later in (stores, token_stores):
            self._last_stored.update(dict.fromkeys(_sources(later), now + 1))
        fence = None
        if last > self._fenced:
            fence = self._step - last // 2
            self._fenced = now if fence == 0 else last | 1
        self._step += 1
        return fence


def _sources(stores: Sequence[tuple[int, ...]]) -> list[GpuBlockId]:
    if not stores:
        return []
    sources: list[GpuBlockId] = np.asarray(stores, dtype=np.int32)[:, 0].tolist()
    return sources
