"""An index of requests by their number of blocks: the smallest, the largest, the largest below a bound, without a scan.

There is one bucket per block count, oldest first within it, and a bitmap of the buckets that are not empty. A sequence
has at most a few thousand blocks, so the bitmap is an integer of a few hundred bytes, and each look-up takes a few
shifts.
"""

from collections import OrderedDict
from collections.abc import Iterator

from pipemax.control.state.request_state import RequestState
from pipemax.domain.units import RequestId


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

    def smallest(self) -> RequestState | None:
        """Return the request of the smallest size, the oldest among equals."""
        return next(self.ascending(), None)

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
