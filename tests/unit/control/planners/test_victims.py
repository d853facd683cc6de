"""Who leaves the GPU first."""

from pipemax.control.planners.victims import evict_for_room
from pipemax.control.state.batches import Batch
from tests.unit.control.tables import parked, resident, roomy_table


def test_the_longest_leave_first() -> None:
    table, batch = roomy_table(), Batch()
    for name, tokens in (("middle", 100), ("long", 1000), ("short", 10)):
        resident(table, name, tokens, batch=batch)
    evicted = evict_for_room(table, [batch], free_blocks=0, max_on_gpu=1)
    assert [state.id for state in evicted] == ["long", "middle"]


def test_no_more_are_evicted_than_the_room_asks_for() -> None:
    table = roomy_table(gpu_blocks=100)
    first, second = Batch(), Batch()
    for name, batch in (("a", first), ("b", first), ("c", second)):
        resident(table, name, 300, batch=batch)  # 19 blocks each
    evicted = evict_for_room(table, [first, second], free_blocks=60, max_on_gpu=10)
    assert [state.id for state in evicted] == ["a"]
    assert table.free_gpu_blocks == 62
    assert evict_for_room(table, [first], free_blocks=62, max_on_gpu=10) == []


def test_batches_are_used_up_in_the_order_given() -> None:
    table = roomy_table(gpu_blocks=100)
    first, second = Batch(), Batch()
    for name, batch in (("a", first), ("b", second)):
        resident(table, name, 300, batch=batch)
    evicted = evict_for_room(table, [second, first], free_blocks=1000, max_on_gpu=10)
    assert [state.id for state in evicted] == ["b", "a"]


def test_slots_are_made_room_for_as_blocks_are() -> None:
    table, batch = roomy_table(), Batch()
    for name in "abc":
        resident(table, name, 20, batch=batch)
    evicted = evict_for_room(table, [batch], free_blocks=0, max_on_gpu=1)
    assert [state.id for state in evicted] == ["a", "b"]


def test_a_request_whose_prefix_the_plan_uses_is_not_evicted() -> None:
    table, batch = roomy_table(), Batch()
    resident(table, "holder", 50, batch=batch, prefix="shared")
    other = resident(table, "other", 50, batch=batch)
    sharer = parked(table, "sharer", 50, prefix="shared")
    table.prefetch(sharer, Batch())
    evicted = evict_for_room(table, [batch], free_blocks=10_000, max_on_gpu=10)
    assert evicted == [other]
