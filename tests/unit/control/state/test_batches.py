"""Which residents decode together: the initial partition, the rotation, and membership."""

import pytest

from pipemax.control.state.batches import Batch, Rotation, partition_balanced
from tests.unit.control.tables import park_lengths, parked, resident, roomy_table


@pytest.mark.parametrize("num_batches", [1, 2, 3, 8])
def test_partition_is_equal_in_count_and_balanced_in_length(num_batches: int) -> None:
    lengths = [7, 2000, 13, 900, 33, 34, 35, 1500, 64, 65, 1, 2, 400, 401, 402]
    states = park_lengths(roomy_table(), lengths)
    batches = partition_balanced(states, num_batches)
    assert sorted(s.id for batch in batches for s in batch) == sorted(s.id for s in states)
    counts = [len(batch) for batch in batches]
    assert max(counts) - min(counts) <= 1
    kv_tokens = [sum(s.computed_tokens for s in batch) for batch in batches]
    assert max(kv_tokens) - min(kv_tokens) <= max(lengths)


def test_fewer_requests_than_batches_leave_batches_empty() -> None:
    batches = partition_balanced(park_lengths(roomy_table(), [5, 5]), 4)
    assert sorted(len(batch) for batch in batches) == [0, 0, 1, 1]


def test_batches_execute_in_cyclic_order_whatever_their_number() -> None:
    rotation = Rotation(3)
    seen = []
    for _ in range(4):
        seen.append((rotation.executing, rotation.next, rotation.overwritten))
        rotation.iteration += 1
    assert seen == [(0, 1, 2), (1, 2, 0), (2, 0, 1), (0, 1, 2)]


def test_empty_batches_are_skipped() -> None:
    table, rotation = roomy_table(), Rotation(4)
    resident(table, "a", 10, batch=rotation.batches[2])
    assert rotation.skip_empty() == 2
    assert rotation.executing == 2


def test_rotation_without_requests_stays_where_it_was() -> None:
    rotation = Rotation(4)
    assert rotation.skip_empty() == 4
    assert rotation.executing == 0


def test_rotation_order_begins_with_the_overwritten_batch_and_ends_with_the_next() -> None:
    rotation = Rotation(4)
    rotation.iteration = 1
    assert [rotation.batches.index(batch) for batch in rotation.behind()] == [0, 3, 2]
    assert rotation.overwritten == 0
    assert rotation.next == 2


def test_a_batch_keeps_its_sums() -> None:
    table, batch = roomy_table(), Batch()
    states = [resident(table, name, tokens, batch=batch) for name, tokens in (("a", 31), ("b", 32))]
    assert (len(batch), batch.kv_tokens, batch.own_blocks) == (2, 63, 2 + 3)
    table.advance_decode(states)
    assert (batch.kv_tokens, batch.own_blocks) == (65, 3 + 3)
    batch.check_integrity()
    table.evict(states[0])
    assert (len(batch), batch.kv_tokens, batch.own_blocks) == (1, 33, 3)
    batch.check_integrity()


# Residents.


def test_a_resident_is_a_member_of_one_batch_wherever_it_is_moved() -> None:
    table, rotation = roomy_table(), Rotation(2)
    state = resident(table, "a", 40)
    assert [*table.unassigned.members] == [state]
    for batch in rotation.batches:
        table.assign(state, batch)
        assert [*batch.members] == [state]
        table.check_integrity(rotation)
    assert [len(batch) for batch in (table.unassigned, *rotation.batches)] == [0, 0, 1]


def test_prefill_dissolves_the_decode_batches() -> None:
    table, rotation = roomy_table(), Rotation(2)
    for name, batch in zip("ab", rotation.batches, strict=True):
        resident(table, name, 40, batch=batch)
    table.dissolve(rotation)
    assert [state.id for state in table.unassigned.members] == ["a", "b"]
    assert [len(batch) for batch in rotation.batches] == [0, 0]
    table.check_integrity(rotation)


def test_a_deferred_resident_is_marked_until_it_runs() -> None:
    table, rotation = roomy_table(), Rotation(2)
    state = resident(table, "a", 40, batch=rotation.batches[0])
    table.defer(state, rotation.batches[1])
    assert state.is_deferred
    table.advance_decode([state])
    assert not state.is_deferred


def test_a_parked_request_is_in_no_batch() -> None:
    table = roomy_table()
    state = parked(table, "a", 40)
    with pytest.raises(KeyError):
        table.assign(state, Batch())
