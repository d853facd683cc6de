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
    # What has left its windows is counted until its next step.
    needed, live = needs.own_blocks(state, state.computed_tokens), ledger.live.own_blocks(state.id)
    assert needed <= live <= max(needed, needs.reserved_blocks(state, state.computed_tokens)), (state, needed)
    assert live == needed or not needs.shares_prefixes(), (state, needed)
    if state.place is Place.PREFILLING:
        return
    assert on_gpu is (state.place is not Place.PARKED), state
    if on_gpu:
        held = ledger.gpu.own_blocks(state.id)
        computed = state.computed_tokens
        needed = needs.gpu_blocks(state, computed, computed)
        most = needs.gpu_blocks(state, 0, computed + 1)
        assert needed <= held <= most, (state, needed, held, most)
    next_slot = needs.own_blocks_with_next(state)
    assert state.blocks == next_slot, (state, next_slot)
    assert state.target_tokens <= state.computed_tokens <= state.max_kv_tokens, state
