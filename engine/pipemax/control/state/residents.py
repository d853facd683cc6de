"""Batch membership: which residents decode together."""

from pipemax.control.state.batches import Batch, Rotation
from pipemax.control.state.request_state import RequestState
from pipemax.domain.units import RequestId


class Residents:
    """Requests with all of their KV on the GPU.

    Invariant: each resident is a member of exactly one batch: of a decode batch D_i, or of ``unassigned``, which holds
    all residents during prefill. Moving a resident between batches copies no KV.
    """

    def __init__(self) -> None:
        self._unassigned = Batch()
        self._batch_of: dict[RequestId, Batch] = {}

    def __len__(self) -> int:
        return len(self._batch_of)

    @property
    def unassigned(self) -> Batch:
        """The residents that are in no decode batch."""
        return self._unassigned

    def holds(self, state: RequestState) -> bool:
        return state.id in self._batch_of

    def batch_of(self, state: RequestState) -> Batch:
        """Return a resident's batch. Raise ``KeyError`` if the request is not resident."""
        return self._batch_of[state.id]

    def add(self, state: RequestState, batch: Batch) -> None:
        assert state.id not in self._batch_of, state
        batch.add(state)
        self._batch_of[state.id] = batch

    def remove(self, state: RequestState) -> None:
        """Remove a resident from its batch. Raise ``KeyError`` if the request is not resident."""
        self._batch_of.pop(state.id).remove(state)

    def assign(self, state: RequestState, batch: Batch) -> None:
        """Move a resident to another batch."""
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
                self.assign(state, self._unassigned)

    def check_integrity(self, rotation: Rotation) -> None:
        """Recount the batches; ``AssertionError`` with the values where they differ. O(residents): for tests."""
        members: dict[RequestId, Batch] = {}
        for batch in (self._unassigned, *rotation.batches):
            batch.check_integrity()
            members |= dict.fromkeys((state.id for state in batch.members), batch)
        assert members == self._batch_of, (members.keys(), self._batch_of.keys())
