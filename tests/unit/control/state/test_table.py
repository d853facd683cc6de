"""Moves between places: each keeps the ledger and the indexes in step."""

import pytest

from pipemax.control.state.batches import Rotation
from pipemax.control.state.request import Place
from pipemax.domain.errors import PoolExhaustedError
from pipemax.domain.request import PrefixId, SharedPrefix
from tests.unit.control.fake_engine import spec
from tests.unit.control.tables import parked, resident, roomy_table, waiting


def test_a_request_counts_where_it_is_from_admission_to_its_end() -> None:
    table, rotation = roomy_table(), Rotation(2)
    state = waiting(table, "a", 40)
    assert (table.num_waiting, table.num_started) == (1, 0)
    table.start_prefill(state, 3)
    table.advance_prefill(state, 20)
    assert (table.num_prefilling, table.num_decodable) == (1, 0)
    table.advance_prefill(state, 20)
    assert (table.num_prefilling, table.num_decodable) == (0, 1)
    table.complete(state, makes_output=False)
    assert state.output_tokens == 0
    table.complete(state, makes_output=True)
    assert state.output_tokens == 1
    table.check_integrity(rotation)
    table.evict(state)
    assert (table.num_parked, table.num_on_gpu) == (1, 0)
    table.prefetch(state, rotation.batches[1])
    assert (table.num_parked, table.num_on_gpu) == (0, 1)
    table.check_integrity(rotation)
    table.remove(state)
    assert len(table) == table.num_on_gpu == table.reserved_blocks == 0
    table.check_integrity(rotation)


def test_what_is_evicted_in_flight_may_be_prefetched_once_its_step_completed() -> None:
    table, rotation = roomy_table(), Rotation(2)
    state = resident(table, "a", 40, batch=rotation.batches[0])
    table.advance_decode([state])
    table.evict(state)
    table.check_integrity(rotation)
    assert (state.place, table.num_parked) == (Place.PARKED, 0)
    table.begin_plan(7)
    table.complete(state, makes_output=True)
    table.begin_plan(9)
    assert table.longest_parked() is state
    assert table.steps_parked(state) == 2


def test_recomputing_drops_both_copies_and_puts_the_request_ahead() -> None:
    table, rotation = roomy_table(), Rotation(2)
    dropped = parked(table, "dropped", 40)
    waiting(table, "other", 40)
    table.recompute(dropped)
    assert table.first_waiting() is dropped
    assert table.reserved_blocks == table.live_blocks == 0
    assert dropped.target_tokens == 40 + dropped.output_tokens
    table.check_integrity(rotation)


def test_a_retracted_chunk_keeps_its_turn() -> None:
    table, rotation = roomy_table(), Rotation(2)
    states = [waiting(table, name, 40) for name in "ab"]
    for state in states:
        table.start_prefill(state, 3)
    table.advance_prefill(states[0], 40)
    assert [state.id for state in table.prefilling()] == ["b"]
    table.retract(states[0], 40)
    assert [state.id for state in table.prefilling()] == ["a", "b"]
    assert (states[0].computed_tokens, table.num_on_gpu) == (0, 0)
    table.check_integrity(rotation)


def test_a_prefetch_without_room_raises_and_changes_nothing() -> None:
    table, rotation = roomy_table(gpu_blocks=10), Rotation(2)
    state = parked(table, "a", 100, max_tokens=10)
    resident(table, "b", 100, max_tokens=10)
    with pytest.raises(PoolExhaustedError):
        table.prefetch(state, rotation.batches[0])
    assert (state.place, table.num_parked) == (Place.PARKED, 1)
    table.check_integrity(rotation)


def test_a_prefix_is_shared_from_the_plan_after_the_step_that_computed_it() -> None:
    table = roomy_table()
    first, second = (waiting(table, name, 50, prefix="shared") for name in "ab")
    table.start_prefill(first, 2)
    table.advance_prefill(first, 50)
    assert table.needs.cached_prefix_tokens(second) == 0
    table.begin_plan(1)
    assert table.needs.cached_prefix_tokens(second) == 32
    assert not table.is_prefix_provider(first)
    table.start_prefill(second, 2)
    table.advance_prefill(second, 18)
    assert table.is_prefix_provider(first)
    table.begin_plan(2)
    assert not table.is_prefix_provider(first)


def test_a_prefix_has_one_length() -> None:
    table = roomy_table()
    waiting(table, "a", 50, prefix="shared")
    other = SharedPrefix(prefix_id=PrefixId("shared"), num_tokens=48)
    with pytest.raises(ValueError, match="prefix shared has 32 tokens, not 48"):
        table.admit(spec("b", 60, 10, prefix=other), 70)
    assert len(table) == 1
