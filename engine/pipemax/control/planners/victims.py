"""Chooses the requests to evict: members of the overwritten batch D_k (PipeMax, §3.3.2, which gives no order).

Room for a prefetch comes only from the overwritten batch D_k, the longest first, which displaces the fewest requests
per block. Room for the executing batch to grow comes from the requests that run last: D_k, then the batches before it,
then the next one, then a request that is being prefetched. Evicting needs no copy,
since the host has a replica of everything.
"""

from collections.abc import Collection, Iterable

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
