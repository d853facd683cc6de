"""Everything that must hold between the requests, the indexes and the ledger, recounted from the requests."""

from pipemax.control.state.batches import Rotation
from pipemax.control.state.request_state import Place, RequestState
from pipemax.control.state.request_table import RequestTable


def check_integrity(table: RequestTable, rotation: Rotation) -> None:
    """``AssertionError`` with the values where anything differs. O(live): for tests."""
    table.ledger.check_integrity()
    batches = [table.unassigned, *rotation.batches]
    for batch in batches:
        batch.check_integrity()
    places = {place: {s.id: s for s in table.states.values() if s.place is place} for place in Place}
    assert places[Place.WAITING].keys() == table.waiting.keys() | table.dropped.keys()
    assert table.waiting_kv_tokens == sum(s.expected_kv_tokens for s in places[Place.WAITING].values())
    assert places[Place.PREFILLING].keys() == table.prefilling.keys()
    assert places[Place.RESIDENT].keys() == {id_ for batch in batches for id_ in batch.members}
    assert places[Place.PREFETCHING].keys() == table.prefetching.keys()
    ready = {s.id for s in places[Place.PARKED].values() if s.num_in_flight == 0}
    assert ready == table.parked_in_order.keys(), (ready, [*table.parked_in_order])
    assert len(table.parked) == len(ready), (len(table.parked), len(ready))
    assert table.num_started == len(table.states) - table.num_waiting
    for state in table.states.values():
        _check_state(table, state)


def _check_state(table: RequestTable, state: RequestState) -> None:
    on_gpu = state.id in table.ledger.gpu
    if state.place is Place.WAITING:
        assert not on_gpu, state
        assert state.id not in table.ledger.host, state
        return
    needed = table.own_blocks_for(state, state.computed_tokens)
    assert table.ledger.live.own_blocks(state.id) == needed, (state, needed)
    if state.place is Place.PREFILLING:
        return
    assert on_gpu is (state.place is not Place.PARKED), state
    if on_gpu:
        held = table.ledger.gpu.own_blocks(state.id)
        needed = table.gpu_blocks_for(state, state.computed_tokens)
        most = table.gpu_blocks_for(state, state.computed_tokens + 1)
        assert needed <= held <= most, (state, needed, held, most)
    next_slot = state.computed_tokens // table.block_tokens + 1 - state.num_shared_blocks
    assert state.blocks == next_slot, (state, next_slot)
    assert state.target_tokens <= state.computed_tokens <= state.max_kv_tokens, state
