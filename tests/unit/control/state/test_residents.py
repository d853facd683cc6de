"""Each resident is a member of exactly one batch."""

import pytest

from pipemax.control.state.batches import Rotation
from tests.unit.control.tables import parked, resident, roomy_table


def test_a_resident_is_a_member_of_one_batch_wherever_it_is_moved() -> None:
    table, rotation = roomy_table(), Rotation(2)
    state = resident(table, "a", 40)
    assert [*table.residents.unassigned.members] == [state]
    for batch in rotation.batches:
        table.residents.assign(state, batch)
        assert table.residents.batch_of(state) is batch
        table.residents.check_integrity(rotation)
    assert [len(batch) for batch in (table.residents.unassigned, *rotation.batches)] == [0, 0, 1]


def test_prefill_dissolves_the_decode_batches() -> None:
    table, rotation = roomy_table(), Rotation(2)
    for name, batch in zip("ab", rotation.batches, strict=True):
        resident(table, name, 40, batch=batch)
    table.residents.dissolve(rotation)
    assert [state.id for state in table.residents.unassigned.members] == ["a", "b"]
    assert [len(batch) for batch in rotation.batches] == [0, 0]
    table.residents.check_integrity(rotation)


def test_a_deferred_resident_is_marked_until_it_runs() -> None:
    table, rotation = roomy_table(), Rotation(2)
    state = resident(table, "a", 40, batch=rotation.batches[0])
    table.residents.defer(state, rotation.batches[1])
    assert state.is_deferred
    table.progress.advance_decode([state])
    assert not state.is_deferred


def test_a_parked_request_is_in_no_batch() -> None:
    table = roomy_table()
    state = parked(table, "a", 40)
    assert not table.residents.holds(state)
    with pytest.raises(KeyError):
        table.residents.batch_of(state)
