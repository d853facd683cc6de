"""The live requests by place: the waiting queue, the parked requests, and an index for each other place."""

from collections import OrderedDict
from collections.abc import Iterator

from pipemax.control.state.batches import Batch, Residents, Rotation
from pipemax.control.state.request import LengthIndex, Picker, Place, RequestState
from pipemax.domain.units import RequestId


class WaitingQueue:
    """Requests without KV, in the order in which they are prefilled, and the KV tokens that they are forecast to need.

    Requests to recompute go ahead of requests that were never prefilled, so that a request which has output already
    does not wait behind the whole input. Within each kind it is first come, first served.

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


class LiveRequests:
    """The requests that were admitted and have neither finished nor been aborted.

    All may read it; only the table, which keeps the blocks in step, moves requests. Every look-up is O(1) or lazy: no
    decision scans the parked or the waiting requests.

    Invariant: a request is in the index of its ``place`` and in no other; with a step in flight, a parked one is in
    none. ``blocks``, ``computed_tokens`` and ``num_in_flight`` must not change between entering and leaving a place,
    unless the index is told.
    """

    def __init__(self) -> None:
        self._states: dict[RequestId, RequestState] = {}
        self._waiting = WaitingQueue()
        self._prefilling: OrderedDict[RequestId, RequestState] = OrderedDict()
        self._prefetching: dict[RequestId, RequestState] = {}
        self._residents = Residents()
        self._parked = ParkedRequests()
        # All requests that hold KV, in the order in which their prefill started.
        self._started: OrderedDict[RequestId, RequestState] = OrderedDict()
        self._step = 0

    def __len__(self) -> int:
        return len(self._states)

    def __iter__(self) -> Iterator[RequestState]:
        return iter(self._states.values())

    def find(self, request_id: RequestId) -> RequestState | None:
        """Return the live request with this id; None where there is none."""
        return self._states.get(request_id)

    # Waiting.

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def waiting_kv_tokens(self) -> int:
        """The KV tokens that the waiting requests will hold at their expected ends, without shared prefixes."""
        return self._waiting.kv_tokens

    def first_waiting(self) -> RequestState | None:
        """Return the request that is prefilled next."""
        return self._waiting.first()

    # With KV.

    @property
    def num_started(self) -> int:
        """The number of requests that hold KV."""
        return len(self._started)

    @property
    def num_decodable(self) -> int:
        """The number of requests that hold the KV of their whole prompt."""
        return len(self._started) - len(self._prefilling)

    def youngest_started(self) -> Iterator[RequestState]:
        """Iterate over the requests that hold KV, from the last to start its prefill. They must not change."""
        return reversed(self._started.values())

    @property
    def num_prefilling(self) -> int:
        """The number of prompts that are begun and not complete."""
        return len(self._prefilling)

    def prefilling(self) -> list[RequestState]:
        """Return the requests whose prompt is begun and not complete, in the order of their next chunks."""
        return [*self._prefilling.values()]

    def prefetching(self) -> list[RequestState]:
        """Return the requests that are prefetched over several steps: at most one."""
        return [*self._prefetching.values()]

    # On the GPU.

    @property
    def unassigned(self) -> Batch:
        """The residents that are in no decode batch."""
        return self._residents.unassigned

    def assign(self, state: RequestState, batch: Batch) -> None:
        """Move a resident to another batch, which moves no KV."""
        self._residents.assign(state, batch)

    def defer(self, state: RequestState, batch: Batch) -> None:
        """Move a resident to a batch that runs later, and mark it as deferred until its next step."""
        self._residents.assign(state, batch)
        state.is_deferred = True

    def dissolve(self, rotation: Rotation) -> None:
        """Move all members of the decode batches to ``unassigned``, at the switch to prefill."""
        for batch in rotation.batches:
            for state in list(batch.members):
                self._residents.assign(state, self.unassigned)

    # Parked, with no step in flight: what may be prefetched.

    @property
    def num_parked(self) -> int:
        return len(self._parked)

    def longest_parked(self) -> RequestState | None:
        """Return the request that was parked first."""
        return self._parked.oldest()

    def shortest_parked(self) -> RequestState | None:
        """Return the parked request with the fewest blocks."""
        return self._parked.shortest()

    def steps_parked(self, state: RequestState) -> int:
        """Return for how many steps a parked request could have been prefetched."""
        return self._step - state.parked_at

    def parked_by_age(self) -> Iterator[RequestState]:
        """Iterate over the parked requests, the first parked first. They must not change meanwhile."""
        return iter(self._parked)

    def parked_picker(self) -> Picker:
        """Return a picker of parked requests by length. They must not change while it is used."""
        return self._parked.picker()

    def _check_places(self, rotation: Rotation) -> None:
        """Recount every index from the requests; ``AssertionError`` where one differs. O(live): for tests."""
        self._waiting.check_integrity()
        self._parked.check_integrity()
        self._residents.check_integrity(rotation)
        indexes: dict[Place, set[RequestId]] = {
            Place.WAITING: {state.id for state in self._waiting},
            Place.PREFILLING: {*self._prefilling},
            Place.RESIDENT: {state.id for state in self if self._residents.holds(state)},
            Place.PREFETCHING: {*self._prefetching},
            Place.PARKED: {state.id for state in self._parked},
        }
        for place, index in indexes.items():
            # A request that is parked with a step in flight is in no index.
            ready = {
                s.id for s in self if s.place is place and not (place is Place.PARKED and s.num_in_flight)
            }
            assert ready == index, (place, ready, index)
        assert len(self._residents) == len(indexes[Place.RESIDENT]), "a resident is not live"
        assert self.num_started == len(self) - self.num_waiting, (
            self.num_started,
            len(self),
            self.num_waiting,
        )

    # Moves between places.

    def _begin_step(self, step: int) -> None:
        """Begin the plan of a step: requests parked from now on count as parked in that step."""
        self._step = step

    def _queue(self, state: RequestState) -> None:
        """Queue a new request."""
        assert state.place is Place.WAITING, state
        self._states[state.id] = state
        self._waiting.append(state)

    def _forget(self, state: RequestState) -> None:
        """Remove a request, wherever it is."""
        self._leave(state)
        del self._states[state.id]
        self._started.pop(state.id, None)

    def _begin_prefill(self, state: RequestState) -> None:
        """Move a waiting request behind the prompts that are prefilled already."""
        self._leave(state)
        state.place = Place.PREFILLING
        self._prefilling[state.id] = self._started[state.id] = state

    def _resume_prefill(self, state: RequestState) -> None:
        """Move a request ahead of the other prompts: a step that was planned for it did not run."""
        self._leave(state)
        state.place = Place.PREFILLING
        self._prefilling[state.id] = state
        self._prefilling.move_to_end(state.id, last=False)

    def _join(self, state: RequestState, batch: Batch) -> None:
        """Make a request a resident, as the newest member of a batch."""
        self._leave(state)
        state.place = Place.RESIDENT
        self._residents.add(state, batch)

    def _begin_prefetching(self, state: RequestState) -> None:
        """Take a parked request out of those that may be prefetched, for a prefetch over several steps."""
        self._leave(state)
        state.place = Place.PREFETCHING
        self._prefetching[state.id] = state

    def _park(self, state: RequestState) -> None:
        """Park a request; it may be prefetched once nothing of it is in flight."""
        self._leave(state)
        state.place = Place.PARKED
        if state.num_in_flight == 0:
            self._settle(state)

    def _settle(self, state: RequestState) -> None:
        """Let a parked request be prefetched: its last step in flight has completed."""
        state.parked_at = self._step
        self._parked.add(state)

    def _requeue(self, state: RequestState) -> None:
        """Move a request whose KV is dropped to the waiting queue, ahead of those never prefilled."""
        self._leave(state)
        del self._started[state.id]
        state.place = Place.WAITING
        self._waiting.append_to_recompute(state)

    def _leave(self, state: RequestState) -> None:
        match state.place:  # the commonest moves first
            case Place.RESIDENT:
                self._residents.remove(state)
            case Place.PARKED:
                if state.num_in_flight == 0:
                    self._parked.remove(state)
            case Place.PREFILLING:
                del self._prefilling[state.id]
            case Place.WAITING:
                self._waiting.remove(state)
            case Place.PREFETCHING:
                del self._prefetching[state.id]
