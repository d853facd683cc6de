"""Parked requests that a prefetch may take, by length and by the time at which they were parked."""

from collections import OrderedDict
from collections.abc import Iterator

from pipemax.control.state.length_index import LengthIndex, Picker
from pipemax.control.state.request_state import RequestState
from pipemax.domain.units import RequestId


class ParkedRequests:
    """Requests with their KV in the host pool only and with no step in flight: P_t is chosen from them.

    Invariant: both indexes hold the same requests, and ``blocks`` of a request does not change while it is here.
    """

    def __init__(self) -> None:
        self._by_length = LengthIndex()
        # An OrderedDict, because a dict is slow to find its first entry after many were removed from its front.
        self._by_age: OrderedDict[RequestId, RequestState] = OrderedDict()

    def __len__(self) -> int:
        return len(self._by_age)

    def __iter__(self) -> Iterator[RequestState]:
        """Iterate from the request that was parked first. The set must not change meanwhile."""
        return iter(self._by_age.values())

    def oldest(self) -> RequestState | None:
        """Return the request that was parked first."""
        return next(iter(self._by_age.values()), None)

    def shortest(self) -> RequestState | None:
        """Return the request with the fewest blocks, the first parked among equals."""
        return self._by_length.smallest()

    def picker(self) -> Picker:
        """Return a picker of requests by length. The set must not change while it is used."""
        return self._by_length.picker()

    def add(self, state: RequestState) -> None:
        self._by_length.add(state, state.blocks)
        self._by_age[state.id] = state

    def remove(self, state: RequestState) -> None:
        """Remove a request. Raise ``KeyError`` if it is not parked."""
        self._by_length.discard(state, state.blocks)
        del self._by_age[state.id]

    def check_integrity(self) -> None:
        """Compare both indexes; ``AssertionError`` with the values where they differ. O(parked): for tests."""
        assert len(self._by_length) == len(self._by_age), (len(self._by_length), len(self._by_age))
        for state in self:
            assert state in self._by_length, state
