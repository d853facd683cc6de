"""The event heap: what comes first at the same instant."""

import pytest

from pipemax.sim.event_queue import EventQueue, Priority


def test_same_instant_runs_by_priority_then_in_order_of_entry() -> None:
    queue, seen = EventQueue(), list[str]()
    queue.at(1.0, Priority.DECIDE, lambda: seen.append("decide"))
    queue.at(1.0, Priority.STAGE_DONE, lambda: seen.append("stage a"))
    queue.at(1.0, Priority.COPY_DONE, lambda: seen.append("copy"))
    queue.at(1.0, Priority.STAGE_DONE, lambda: seen.append("stage b"))
    queue.at(0.5, Priority.DECIDE, lambda: seen.append("earlier"))
    queue.run()
    assert seen == ["earlier", "copy", "stage a", "stage b", "decide"]


def test_an_event_added_at_the_present_instant_runs_by_priority() -> None:
    queue, seen = EventQueue(), list[str]()

    def first() -> None:
        queue.at(queue.now_s(), Priority.COPY_DONE, lambda: seen.append("copy"))
        seen.append("first")

    queue.at(2.0, Priority.STAGE_DONE, first)
    queue.at(2.0, Priority.DECIDE, lambda: seen.append("decide"))
    queue.run()
    assert seen == ["first", "copy", "decide"]
    assert queue.now_s() == 2.0


def test_an_event_in_the_past_is_refused() -> None:
    queue = EventQueue()
    queue.at(1.0, Priority.DECIDE, lambda: queue.at(0.5, Priority.DECIDE, lambda: None))
    with pytest.raises(AssertionError):
        queue.run()


def test_a_stopped_queue_goes_on_from_the_next_event() -> None:
    queue, seen = EventQueue(), list[str]()

    def pause() -> None:
        seen.append("pause")
        queue.stop()

    queue.at(1.0, Priority.DECIDE, pause)
    queue.at(2.0, Priority.DECIDE, lambda: seen.append("later"))
    queue.run()
    assert (seen, queue.now_s()) == (["pause"], 1.0)
    queue.run()
    assert (seen, queue.now_s()) == (["pause", "later"], 2.0)
