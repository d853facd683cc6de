"""The waiting queue's order and its forecast."""

import pytest

from pipemax.control.state.places import WaitingQueue
from tests.unit.control.tables import roomy_table, waiting


def test_requests_to_recompute_go_ahead_of_those_never_prefilled() -> None:
    table, queue = roomy_table(), WaitingQueue()
    first, second, dropped = (waiting(table, name, 10) for name in ("first", "second", "dropped"))
    queue.append(first)
    queue.append(second)
    queue.append_to_recompute(dropped)
    assert [state.id for state in queue] == ["dropped", "first", "second"]
    assert queue.first() is dropped
    queue.remove(dropped)
    assert queue.first() is first


def test_the_forecast_is_the_sum_over_the_queue() -> None:
    table, queue = roomy_table(), WaitingQueue()
    short, long = waiting(table, "short", 10), waiting(table, "long", 90)
    queue.append(short)
    queue.append_to_recompute(long)
    assert queue.kv_tokens == short.expected_kv_tokens + long.expected_kv_tokens
    queue.remove(short)
    assert (len(queue), queue.kv_tokens) == (1, long.expected_kv_tokens)
    queue.check_integrity()


def test_removing_a_request_that_is_not_waiting_fails() -> None:
    queue, state = WaitingQueue(), waiting(roomy_table(), "a", 10)
    with pytest.raises(KeyError):
        queue.remove(state)
    assert (len(queue), queue.kv_tokens, queue.first()) == (0, 0, None)
