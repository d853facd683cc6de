"""The event heap and its virtual clock: ``(time, priority, sequence, event)``, as in SimPy.

At one instant, events run by priority and then in the order in which they were added, so runs repeat exactly.
"""

import heapq
from collections.abc import Callable
from enum import IntEnum


class Priority(IntEnum):
    """The order of events at the same instant: those that report an end come before those that start anything."""

    COPY_DONE = 0
    STAGE_DONE = 1
    ARRIVAL = 2
    DECIDE = 3


class EventQueue:
    """Runs events in order. An event is a call without arguments; it may add further events."""

    def __init__(self) -> None:
        self._now_s = 0.0
        self._heap: list[tuple[float, int, int, Callable[[], None]]] = []
        self._sequence = 0
        self._is_stopped = False

    def now_s(self) -> float:
        return self._now_s

    def at(self, time_s: float, priority: Priority, event: Callable[[], None]) -> None:
        """Schedule ``event`` to run at ``time_s``, which must not lie in the past."""
        assert time_s >= self._now_s, (time_s, self._now_s)
        heapq.heappush(self._heap, (time_s, priority, self._sequence, event))
        self._sequence += 1

    def __len__(self) -> int:
        return len(self._heap)

    def run(self) -> None:
        """Run events until none are left, or one of them stops the queue. Go on from there if called again."""
        self._is_stopped = False
        heap = self._heap
        while heap and not self._is_stopped:
            self._now_s, _, _, event = heapq.heappop(heap)
            event()

    def stop(self) -> None:
        """Have ``run`` return after this event."""
        self._is_stopped = True

    def run_next(self) -> None:
        """Run the next event. ``IndexError`` if none is left."""
        time_s, _, _, event = heapq.heappop(self._heap)
        self._now_s = time_s
        event()

    def run_until(self, time_s: float) -> None:
        """Run the events up to ``time_s``, and move the clock there unless it is later already."""
        while self._heap and self._heap[0][0] <= time_s:
            self.run_next()
        self._now_s = max(self._now_s, time_s)
