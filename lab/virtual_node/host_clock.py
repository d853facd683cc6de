"""How the time that the host takes, which is real, enters the time of a virtual node.

``WallClock`` really waits for the node. ``SkippingClock`` leaves the waits out and counts the CPU time of the host's
thread, so that a run takes as long as the host works, and what else the machine does is not measured with it. Both
leave out what the virtual node itself takes: a real node would do that on its GPUs or in other processes. A
``WallClock`` that never stops counts it, as long as steps in flight do not hide it.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class HostClock(ABC):
    """The node's time as the host's one thread sees it, in seconds since the clock was made."""

    def __init__(self) -> None:
        self.waited_s = 0.0
        """The part of the node's time in which the host waited for the node."""
        self._not_counted_s = 0.0
        self._start_s = self._read_s()

    @property
    def worked_s(self) -> float:
        """The part of the node's time in which the host worked."""
        return self.now_s() - self.waited_s

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stop the clock while the caller works for the virtual node."""
        begin_s = self._read_s()
        try:
            yield
        finally:
            self._not_counted_s += self._read_s() - begin_s

    @abstractmethod
    def now_s(self) -> float: ...

    @abstractmethod
    def wait_until(self, time_s: float) -> None:
        """Wait until the node's time is ``time_s``, unless it is later already."""

    @abstractmethod
    def _read_s(self) -> float:
        """Return the host's seconds from any moment on."""

    def _counted_s(self) -> float:
        return self._read_s() - self._start_s - self._not_counted_s


class WallClock(HostClock):
    """A second of the node is ``stretch`` seconds of the wall clock: above 1 for a slow host, below 1 for tests."""

    def __init__(self, stretch: float = 1.0, *, never_stops: bool = False) -> None:
        """Start at 0. ``ValueError`` unless ``stretch`` is above zero.

        With ``never_stops``, ``paused`` does nothing: the node's seconds are the wall clock's, whatever the host does.
        """
        if not stretch > 0:
            raise ValueError(f"stretch is {stretch}, must be above zero")
        self._stretch = stretch
        self._never_stops = never_stops
        super().__init__()

    @contextmanager
    def paused(self) -> Iterator[None]:
        if self._never_stops:
            yield
            return
        with super().paused():
            yield

    def now_s(self) -> float:
        return self._counted_s() / self._stretch

    def wait_until(self, time_s: float) -> None:
        begin_s = self.now_s()
        while (left_s := time_s - self.now_s()) > 0:
            time.sleep(left_s * self._stretch)
        self.waited_s += self.now_s() - begin_s

    def _read_s(self) -> float:
        return time.perf_counter()


class SkippingClock(HostClock):
    """The host's CPU time counts ``host_factor`` times, 0 for a host that takes no time; waits take none.

    With 0, a run is the same each time.
    """

    def __init__(self, host_factor: float = 1.0, *, cpu_s: Callable[[], float] = time.thread_time) -> None:
        """Start at 0. ``cpu_s`` reads the thread's CPU seconds. ``ValueError`` for a negative factor."""
        if not host_factor >= 0:
            raise ValueError(f"host_factor is {host_factor}, must not be negative")
        self._host_factor = host_factor
        self._cpu_s = cpu_s
        super().__init__()

    def now_s(self) -> float:
        return self.waited_s + self._host_factor * self._counted_s()

    def wait_until(self, time_s: float) -> None:
        self.waited_s += max(0.0, time_s - self.now_s())

    def _read_s(self) -> float:
        return self._cpu_s()
