"""The live requests by place: an index for each of them."""

from collections import OrderedDict
from collections.abc import Iterator
from itertools import chain

from pipemax.control.state.batches import Batch, Rotation
from pipemax.control.state.request import LengthIndex, Picker, Place, RequestState
from pipemax.domain.units import RequestId


class LiveRequests:
    """The requests that were admitted and have neither finished nor been aborted.

    All may read it; only the table, which keeps the blocks in step, moves requests. Every look-up is O(1) or lazy: no
    decision scans the parked or the waiting requests.

    Invariant: a request is in the index of its ``place`` and in no other; with a step in flight, a parked one is in
    none. A resident is a member of exactly one batch. ``blocks``, ``computed_tokens`` and ``num_in_flight`` must not
    change between entering and leaving a place, unless the index is told.
    """

    def __init__(self) -> None:
        self._states: dict[RequestId, RequestState] = {}
        # OrderedDicts, because a dict is slow to find its first entry after many were removed from its front.
        # Requests to recompute go ahead of requests that were never prefilled, so that a request which has output
        # already does not wait behind the whole input. Within each kind it is first come, first served.
        self._to_recompute: OrderedDict[RequestId, RequestState] = OrderedDict()
        self._admitted: OrderedDict[RequestId, RequestState] = OrderedDict()
        self._waiting_kv_tokens = 0
        self._prefilling: OrderedDict[RequestId, RequestState] = OrderedDict()
        self._prefetching: dict[RequestId, RequestState] = {}
        self.unassigned = Batch()
        """The residents that are in no decode batch: all of them during prefill."""
        self._batch_of: dict[RequestId, Batch] = {}  # by resident: a decode batch, or the unassigned
        self._parked: OrderedDict[RequestId, RequestState] = OrderedDict()  # the first parked first
        self._parked_by_length = LengthIndex()
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
        return len(self._to_recompute) + len(self._admitted)

    @property
    def waiting_kv_tokens(self) -> int:
        """The KV tokens that the waiting requests will hold at their expected ends, without shared prefixes."""
        return self._waiting_kv_tokens

    def first_waiting(self) -> RequestState | None:
        """Return the request that is prefilled next."""
        return next(self._waiting(), None)

    def _waiting(self) -> Iterator[RequestState]:
        """Iterate over the requests without KV, in the order in which they are prefilled."""
        return chain(self._to_recompute.values(), self._admitted.values())

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

    def assign(self, state: RequestState, batch: Batch) -> None:
        """Move a resident to another batch, which moves no KV. Raise ``KeyError`` if it is not resident."""
        self._batch_of[state.id].remove(state)
        batch.add(state)
        self._batch_of[state.id] = batch

    def defer(self, state: RequestState, batch: Batch) -> None:
        """Move a resident to a batch that runs later, and mark it as deferred until its next step."""
        self.assign(state, batch)
        state.is_deferred = True

    def dissolve(self, rotation: Rotation) -> None:
        """Move all members of the decode batches to ``unassigned``, at the switch to prefill."""
        for batch in rotation.batches:
            for state in list(batch.members):
                self.assign(state, self.unassigned)

    # Parked, with no step in flight: what may be prefetched.

    @property
    def num_parked(self) -> int:
        return len(self._parked)

    def longest_parked(self) -> RequestState | None:
        """Return the request that was parked first."""
        return next(iter(self._parked.values()), None)

    def shortest_parked(self) -> RequestState | None:
        """Return the parked request with the fewest blocks, the first parked among equals."""
        return next(self._parked_by_length.ascending(), None)

    def steps_parked(self, state: RequestState) -> int:
        """Return for how many steps a parked request could have been prefetched."""
        return self._step - state.parked_at

    def parked_by_age(self) -> Iterator[RequestState]:
        """Iterate over the parked requests, the first parked first. They must not change meanwhile."""
        return iter(self._parked.values())

    def parked_picker(self) -> Picker:
        """Return a picker of parked requests by length. They must not change while it is used."""
        return self._parked_by_length.picker()

    def _check_places(self, rotation: Rotation) -> None:
        """Recount every index from the requests; ``AssertionError`` where one differs. O(live): for tests."""
        waiting = [*self._waiting()]
        assert self._waiting_kv_tokens == sum(state.expected_kv_tokens for state in waiting)
        assert len(self._parked_by_length) == len(self._parked)
        assert all(state in self._parked_by_length for state in self._parked.values())
        members: dict[RequestId, Batch] = {}
        for batch in (self.unassigned, *rotation.batches):
            batch.check_integrity()
            members |= dict.fromkeys((state.id for state in batch.members), batch)
        assert members == self._batch_of, (members.keys(), self._batch_of.keys())
        indexes: dict[Place, set[RequestId]] = {
            Place.WAITING: {state.id for state in waiting},
            Place.PREFILLING: {*self._prefilling},
            Place.RESIDENT: {*self._batch_of},
            Place.PREFETCHING: {*self._prefetching},
            Place.PARKED: {*self._parked},
        }
        for place, index in indexes.items():
            # A request that is parked with a step in flight is in no index.
            ready = {
                s.id for s in self if s.place is place and not (place is Place.PARKED and s.num_in_flight)
            }
            assert ready == index, (place, ready, index)
        assert self.num_started == len(self) - self.num_waiting, (self.num_started, len(self))

    # Moves between places.

    def _begin_step(self, step: int) -> None:
        """Begin the plan of a step: requests parked from now on count as parked in that step."""
        self._step = step

    def _queue(self, state: RequestState) -> None:
        """Queue a new request."""
        assert state.place is Place.WAITING, state
        self._states[state.id] = self._admitted[state.id] = state
        self._waiting_kv_tokens += state.expected_kv_tokens

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
        batch.add(state)
        self._batch_of[state.id] = batch

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
        self._parked_by_length.add(state, state.blocks)
        self._parked[state.id] = state

    def _requeue(self, state: RequestState) -> None:
        """Move a request whose KV is dropped to the waiting queue, ahead of those never prefilled."""
        self._leave(state)
        del self._started[state.id]
        state.place = Place.WAITING
        self._to_recompute[state.id] = state
        self._waiting_kv_tokens += state.expected_kv_tokens

    def _leave(self, state: RequestState) -> None:
        match state.place:  # the commonest moves first
            case Place.RESIDENT:
                self._batch_of.pop(state.id).remove(state)
            case Place.PARKED:
                if state.num_in_flight == 0:
                    self._parked_by_length.discard(state, state.blocks)
                    del self._parked[state.id]
            case Place.PREFILLING:
                del self._prefilling[state.id]
            case Place.WAITING:
                if self._to_recompute.pop(state.id, None) is None:
                    del self._admitted[state.id]
                self._waiting_kv_tokens -= state.expected_kv_tokens
            case Place.PREFETCHING:
                del self._prefetching[state.id]
