"""Chooses the requests to evict: members of the overwritten batch D_k (PipeMax, §3.3.2, which gives no order).

Room for a prefetch comes only from the overwritten batch D_k, in the order of a named policy. Room for the executing
batch to grow comes from the requests that run last: D_k, then the batches before it, then the next one, then a request
that is being prefetched. Evicting needs no copy, since the host has a replica of everything.
"""

from collections.abc import Collection, Iterable, Iterator

from pipemax.control.controller_config import VictimPolicy
from pipemax.control.state.batches import Batch
from pipemax.control.state.request import RequestState
from pipemax.control.state.table import RequestTable
from pipemax.domain.units import RequestId


def victims_in_order(batch: Batch, policy: VictimPolicy) -> Iterator[RequestState]:
    """Iterate over a batch's members in the order of eviction. The batch must not change meanwhile."""
    match policy:
        case VictimPolicy.LONGEST_FIRST:
            return batch.longest_first()
        case VictimPolicy.SHORTEST_FIRST:
            return batch.shortest_first()
        case VictimPolicy.OLDEST_FIRST:
            return iter(batch.members)
        case VictimPolicy.NEWEST_FIRST:
            return batch.newest_first()


def evict_for_room(
    table: RequestTable,
    batches: Iterable[Batch],
    policy: VictimPolicy,
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
            for state in victims_in_order(batch, policy):
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
