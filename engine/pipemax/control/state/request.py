"""One live request as the controller keeps it, and requests in order of their blocks.

Only the classes of this package write to a request.
"""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from pipemax.domain.request import PrefixId, RequestSpec
from pipemax.domain.units import RequestId


class SharedBlocks(NamedTuple):
    """The whole blocks of a shared prefix."""

    prefix_id: PrefixId
    num_blocks: int


class Place(Enum):
    """Where a request's KV is."""

    WAITING = "waiting"  # nowhere
    PREFILLING = "prefilling"  # prompt incomplete; on GPU and host as far as it goes
    RESIDENT = "resident"  # on GPU and host; member of a batch
    PREFETCHING = "prefetching"  # on the host; on the GPU only in part, under a reservation
    PARKED = "parked"  # on the host only


@dataclass(slots=True, eq=False)
class RequestState:
    """One live request. Its counts include steps in flight: a plan counts as carried out once it is returned."""

    spec: RequestSpec
    id: RequestId
    shared: SharedBlocks | None
    target_tokens: int
    """Tokens whose KV a prefill must compute: the prompt, and after a recompute the output so far as well."""
    expected_kv_tokens: int
    """The KV tokens, apart from its shared prefix, that it was forecast at admission to hold at its end: what it counts
    for while it waits."""
    place: Place = Place.WAITING
    computed_tokens: int = 0
    cached_tokens: int = 0
    """Tokens of its shared prefix that were on the GPU already when its prefill began: it began behind them."""
    blocks: int = 0
    """Blocks it needs apart from its shared prefix, its next token's slot included; the key of every index."""
    output_tokens: int = 0
    num_in_flight: int = 0
    last_step: int = 0
    """The number, among the steps of which something ran, of the last one planned for it."""
    life: int = 0
    """Incremented when its KV is dropped: steps in flight from before then no longer concern it."""
    num_recomputes: int = 0
    is_deferred: bool = False
    """Moved to a batch that runs later, and has not run since."""
    parked_at: int = 0
    """The step in which it was parked with nothing in flight."""
    prefetched_blocks: int = 0
    """While PREFETCHING: blocks [0, prefetched_blocks) were copied."""

    @property
    def max_kv_tokens(self) -> int:
        return self.spec.max_kv_tokens

    @property
    def num_shared_blocks(self) -> int:
        return self.shared.num_blocks if self.shared else 0


# The smallest, the largest, the largest below a bound, without a scan: there is one bucket per block count, oldest
# first within it, and a bitmap of the buckets that are not empty. A sequence has at most a few thousand blocks, so the
# bitmap is an integer of a few hundred bytes, and each look-up takes a few shifts.


class LengthIndex:
    """A set of requests by size. A request must be discarded with the size with which it was added."""

    def __init__(self) -> None:
        # OrderedDicts, because a dict is slow to find its first entry after many were removed from its front.
        self._buckets: dict[int, OrderedDict[RequestId, RequestState]] = {}
        self._bitmap = 0
        self._num_requests = 0

    def __len__(self) -> int:
        return self._num_requests

    def __contains__(self, state: RequestState) -> bool:
        return state.id in self._buckets.get(state.blocks, ())

    def add(self, state: RequestState, blocks: int) -> None:
        bucket = self._buckets.get(blocks)
        if bucket is None:
            bucket = self._buckets[blocks] = OrderedDict()
            self._bitmap |= 1 << blocks
        assert state.id not in bucket, (state.id, blocks)
        bucket[state.id] = state
        self._num_requests += 1

    def discard(self, state: RequestState, blocks: int) -> None:
        """Remove a request, which must have been added with this size."""
        bucket = self._buckets[blocks]
        del bucket[state.id]
        self._num_requests -= 1
        if not bucket:
            del self._buckets[blocks]
            self._bitmap ^= 1 << blocks

    def descending(self) -> Iterator[RequestState]:
        """Iterate over the requests, largest first. The index must not change meanwhile."""
        bitmap = self._bitmap
        while bitmap:
            blocks = bitmap.bit_length() - 1
            yield from self._buckets[blocks].values()
            bitmap ^= 1 << blocks

    def ascending(self) -> Iterator[RequestState]:
        """Iterate over the requests, smallest first. The index must not change meanwhile."""
        bitmap = self._bitmap
        while bitmap:
            lowest = bitmap & -bitmap
            yield from self._buckets[lowest.bit_length() - 1].values()
            bitmap ^= lowest

    def picker(self) -> "Picker":
        return Picker(self._buckets, self._bitmap)


class Picker:
    """Tentative picks from an index, which must not change meanwhile.

    Each request is handed out once, unless it is given back. A pick costs one look-up, however many requests of the
    same size were picked before.
    """

    def __init__(self, buckets: dict[int, OrderedDict[RequestId, RequestState]], bitmap: int) -> None:
        self._buckets = buckets
        self._bitmap = bitmap
        self._cursors: dict[int, Iterator[RequestState]] = {}
        self._returned: dict[int, list[RequestState]] = {}

    def take_at_most(self, blocks: int) -> RequestState | None:
        """Pick the largest request of at most ``blocks`` blocks; None without any."""
        while blocks > 0:
            size = (self._bitmap & ((2 << blocks) - 1)).bit_length() - 1
            if size < 0:
                return None
            state = self._take(size)
            if state is not None:
                return state
        return None

    def take_smallest(self) -> RequestState | None:
        while self._bitmap:
            state = self._take((self._bitmap & -self._bitmap).bit_length() - 1)
            if state is not None:
                return state
        return None

    def give_back(self, state: RequestState) -> None:
        """Let a request be picked again, ahead of others of its size."""
        self._returned.setdefault(state.blocks, []).append(state)
        self._bitmap |= 1 << state.blocks

    def _take(self, size: int) -> RequestState | None:
        """Pick the next request of a bucket. If there is none, mark the bucket empty and return None."""
        returned = self._returned.get(size)
        if returned:
            return returned.pop()
        cursor = self._cursors.get(size)
        if cursor is None:
            cursor = self._cursors[size] = iter(self._buckets[size].values())
        state = next(cursor, None)
        if state is None:
            self._bitmap &= ~(1 << size)
        return state
