"""Which batch runs when. Partitions and membership are properties: see ``tests/property``."""

from pipemax.control.state.batches import Rotation
from tests.unit.control.tables import resident, roomy_table


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


def test_a_deferred_resident_is_marked_until_it_runs() -> None:
    table, rotation = roomy_table(), Rotation(2)
    state = resident(table, "a", 40, batch=rotation.batches[0])
    table.defer(state, rotation.batches[1])
    assert state.is_deferred
    table.advance_decode([state])
    assert not state.is_deferred
