"""The waiting queue: requests without KV, in the order in which they are prefilled.

Requests to recompute go ahead of requests that were never prefilled, so that a request which has output already does
not wait behind the whole input. Within each kind it is first come, first served.
"""

from collections import OrderedDict
from collections.abc import Iterator

from pipemax.control.state.request_state import RequestState
from pipemax.domain.units import RequestId


class WaitingQueue:
    """Requests without KV, and the KV tokens that they are forecast to need.

    Invariant: ``kv_tokens`` is Σ ``expected_kv_tokens`` of the queue, each shared prefix left out.
    """

    def __init__(self) -> None:
        # OrderedDicts, because a dict is slow to find its first entry after many were removed from its front.
        self._to_recompute: OrderedDict[RequestId, RequestState] = OrderedDict()
        self._admitted: OrderedDict[RequestId, RequestState] = OrderedDict()
        self._kv_tokens = 0

    def __len__(self) -> int:
        return len(self._to_recompute) + len(self._admitted)

    def __iter__(self) -> Iterator[RequestState]:
        yield from self._to_recompute.values()
        yield from self._admitted.values()

    @property
    def kv_tokens(self) -> int:
        return self._kv_tokens

    def first(self) -> RequestState | None:
        """Return the request that is prefilled next; None if the queue is empty."""
        return next(iter(self._to_recompute.values()), None) or next(iter(self._admitted.values()), None)

    def append(self, state: RequestState) -> None:
        """Queue a request that was just admitted."""
        self._admitted[state.id] = state
        self._kv_tokens += state.expected_kv_tokens

    def append_to_recompute(self, state: RequestState) -> None:
        """Queue a request whose KV was dropped."""
        self._to_recompute[state.id] = state
        self._kv_tokens += state.expected_kv_tokens

    def remove(self, state: RequestState) -> None:
        """Remove a request from the queue. Raise ``KeyError`` if it is not waiting."""
        if self._to_recompute.pop(state.id, None) is None:
            del self._admitted[state.id]
        self._kv_tokens -= state.expected_kv_tokens

    def check_integrity(self) -> None:
        """Recount the forecast; ``AssertionError`` with the values where it differs. O(waiting): for tests."""
        recounted = sum(state.expected_kv_tokens for state in self)
        assert self._kv_tokens == recounted, (self._kv_tokens, recounted)
