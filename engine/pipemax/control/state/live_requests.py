"""The live requests by place. One class reads them; another moves them, which only this package uses."""

from collections import OrderedDict
from collections.abc import Iterator

from pipemax.control.state.batches import Batch, Rotation
from pipemax.control.state.length_index import Picker
from pipemax.control.state.parked import ParkedRequests
from pipemax.control.state.request_state import Place, RequestState
from pipemax.control.state.residents import Residents
from pipemax.control.state.waiting import WaitingQueue
from pipemax.domain.units import RequestId


class LiveRequests:
    """Reads the requests that were admitted and have neither finished nor been aborted. Nothing here changes one.

    Every look-up is O(1) or lazy: no decision scans the parked or the waiting requests.
    """

    def __init__(self, residents: Residents) -> None:
        self._states: dict[RequestId, RequestState] = {}
        self._waiting = WaitingQueue()
        self._prefilling: OrderedDict[RequestId, RequestState] = OrderedDict()
        self._prefetching: dict[RequestId, RequestState] = {}
        self._residents = residents
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

    def check_integrity(self, rotation: Rotation) -> None:
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


class RequestPlaces(LiveRequests):
    """Moves the live requests between places.

    Invariant: a request is in the index of its ``place`` and in no other; with a step in flight, a parked one is in
    none. ``blocks``, ``computed_tokens`` and ``num_in_flight`` must not change between entering and leaving a place,
    unless the index is told.
    """

    def begin_plan(self, step: int) -> None:
        """Begin the plan of a step: requests parked from now on count as parked in that step."""
        self._step = step

    def admit(self, state: RequestState) -> None:
        """Queue a new request."""
        assert state.place is Place.WAITING, state
        self._states[state.id] = state
        self._waiting.append(state)

    def remove(self, state: RequestState) -> None:
        """Remove a request, wherever it is."""
        self._leave(state)
        del self._states[state.id]
        self._started.pop(state.id, None)

    def start_prefill(self, state: RequestState) -> None:
        """Move a waiting request behind the prompts that are prefilled already."""
        self._leave(state)
        state.place = Place.PREFILLING
        self._prefilling[state.id] = self._started[state.id] = state

    def resume_prefill(self, state: RequestState) -> None:
        """Move a request ahead of the other prompts: a step that was planned for it did not run."""
        self._leave(state)
        state.place = Place.PREFILLING
        self._prefilling[state.id] = state
        self._prefilling.move_to_end(state.id, last=False)

    def join(self, state: RequestState, batch: Batch) -> None:
        """Make a request a resident, as the newest member of a batch."""
        self._leave(state)
        state.place = Place.RESIDENT
        self._residents.add(state, batch)

    def start_prefetching(self, state: RequestState) -> None:
        """Take a parked request out of those that may be prefetched, for a prefetch over several steps."""
        self._leave(state)
        state.place = Place.PREFETCHING
        self._prefetching[state.id] = state

    def park(self, state: RequestState) -> None:
        """Park a request; it may be prefetched once nothing of it is in flight."""
        self._leave(state)
        state.place = Place.PARKED
        if state.num_in_flight == 0:
            self.settle(state)

    def settle(self, state: RequestState) -> None:
        """Let a parked request be prefetched: its last step in flight has completed."""
        state.parked_at = self._step
        self._parked.add(state)

    def requeue(self, state: RequestState) -> None:
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
