"""Chooses the requests to evict: members of the overwritten batch D_k (PipeMax, §3.3.2, which gives no order).

Room for a prefetch comes only from the overwritten batch D_k, or with waves from what D_i runs, the longest first,
which displaces the fewest requests per block. Room for the executing batch to grow comes from the requests that run
last: D_k, then the batches before it, then the next one, then a request that is being prefetched. Evicting needs no
copy, since the host has a replica of everything.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from pipemax.control.state.batches import Batch
from pipemax.control.state.request import RequestState
from pipemax.control.state.table import RequestTable
from pipemax.domain.units import RequestId


def evict_for_room(
    table: RequestTable,
    batches: Iterable[Batch],
    *,
    free_blocks: int,
    max_on_gpu: int,
    keep: Collection[RequestId] = (),
) -> list[RequestState]:
    """Evict, batch by batch, until ``free_blocks`` are free and at most ``max_on_gpu`` requests hold any.

    The requests of ``keep`` stay. Return the evicted requests. Less may be free in the end if the batches have no more
    members: the caller checks.
    """
    evicted: list[RequestState] = []
    for batch in batches:
        lacking = free_blocks - table.free_gpu_blocks
        too_many = table.num_on_gpu - max_on_gpu
        victims: list[RequestState] = []
        if lacking > 0 or too_many > 0:
            for state in batch.victims():
                if state.id not in keep and not table.is_prefix_provider(state):
                    victims.append(state)
                    lacking -= table.gpu_blocks_of(state)
                    too_many -= 1
                if lacking <= 0 and too_many <= 0:
                    break
        for state in victims:
            table.evict(state)
        evicted += victims
    return evicted


@dataclass(frozen=True, slots=True, kw_only=True)
class RoomSource:
    """The batch that makes room for a prefetch."""

    batch: Batch
    running: Collection[RequestId] | None = None
    """With waves, the members that run in this step: only they make room, and all but the last block of each. None
    without waves: the whole batch may leave."""

    @property
    def max_blocks(self) -> int:
        """The blocks that become free if all leave; somewhat more than that with waves, for members that do not run."""
        return self.batch.own_blocks - (0 if self.running is None else len(self.batch))

    @property
    def max_slots(self) -> int:
        """The slots that become free: with waves none, since the step runs those that leave."""
        return len(self.batch) if self.running is None else 0


def overwrite_for_room(table: RequestTable, source: RoomSource, *, free_blocks: int) -> list[RequestState]:
    """Evict members that run, behind the step's computation, until ``free_blocks`` are free; return them.

    Less may be free in the end, as with ``evict_for_room``.
    """
    victims: list[RequestState] = []
    lacking = free_blocks - table.free_gpu_blocks
    for state in source.batch.victims():
        if lacking <= 0:
            break
        if state.id in (source.running or ()) and not table.is_prefix_provider(state):
            gained = table.overwritable_blocks(state)
            if gained > 0:
                victims.append(state)
                lacking -= gained
    for state in victims:
        table.overwrite(state)
    return victims
