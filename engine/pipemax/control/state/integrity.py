"""Checks everything that must hold between the requests, the indexes and the ledger, by recounting the requests."""

from pipemax.control.state.batches import Rotation
from pipemax.control.state.request_state import Place, RequestState
from pipemax.control.state.request_table import RequestTable


def check_integrity(table: RequestTable, rotation: Rotation) -> None:
    """Recount the state; raise ``AssertionError`` with the values if anything differs. O(live): for tests."""
    table.check_integrity()
    table.requests.check_integrity(rotation)
    for state in table.requests:
        _check_state(table, state)


def _check_state(table: RequestTable, state: RequestState) -> None:
    ledger, needs = table.ledger, table.needs
    on_gpu = state.id in ledger.gpu
    if state.place is Place.WAITING:
        assert not on_gpu, state
        assert state.id not in ledger.host, state
        return
    needed = needs.own_blocks(state, state.computed_tokens)
    assert ledger.live.own_blocks(state.id) == needed, (state, needed)
    if state.place is Place.PREFILLING:
        return
    assert on_gpu is (state.place is not Place.PARKED), state
    if on_gpu:
        held = ledger.gpu.own_blocks(state.id)
        needed = needs.gpu_blocks(state, state.computed_tokens)
        most = needs.gpu_blocks(state, state.computed_tokens + 1)
        assert needed <= held <= most, (state, needed, held, most)
    next_slot = needs.own_blocks_with_next(state)
    assert state.blocks == next_slot, (state, next_slot)
    assert state.target_tokens <= state.computed_tokens <= state.max_kv_tokens, state
