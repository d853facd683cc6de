"""Requests by length, without a scan."""

from pipemax.control.state.request import LengthIndex, RequestState
from tests.unit.control.tables import park_lengths, roomy_table


def index_of(states: list[RequestState]) -> LengthIndex:
    index = LengthIndex()
    for state in states:
        index.add(state, state.blocks)
    return index


def test_smallest_and_largest_are_the_oldest_of_their_length() -> None:
    states = park_lengths(roomy_table(), [40, 10, 90, 11, 91])
    index = index_of(states)
    assert index.smallest() is states[1]
    assert next(index.descending()) is states[2]
    index.discard(states[1], states[1].blocks)
    assert index.smallest() is states[3]
    assert len(index) == 4
    assert states[1] not in index


def test_an_empty_index_has_neither() -> None:
    index = LengthIndex()
    assert index.smallest() is None
    assert next(index.descending(), None) is None
    assert index.picker().take_at_most(100) is None
    assert index.picker().take_smallest() is None


def test_orders_are_by_blocks_and_then_by_age() -> None:
    states = park_lengths(roomy_table(), [40, 10, 90, 11])
    index = index_of(states)
    assert [s.id for s in index.ascending()] == ["p1", "p3", "p0", "p2"]
    assert [s.id for s in index.descending()] == ["p2", "p0", "p1", "p3"]


def test_a_picker_hands_each_request_out_once_until_it_is_given_back() -> None:
    states = park_lengths(roomy_table(), [10, 11, 50])
    index = index_of(states)
    picker = index.picker()
    taken = [picker.take_at_most(3), picker.take_at_most(3)]
    assert taken == [states[0], states[1]]
    assert picker.take_at_most(3) is None
    picker.give_back(states[0])
    assert picker.take_smallest() is states[0]
    assert picker.take_smallest() is states[2]
    assert picker.take_smallest() is None
    assert len(index) == 3
