"""Time as an argument: the one place that reads the machine's clock, and its interface."""

import time
from typing import Protocol


class Clock(Protocol):
    """Seconds that never run backwards, from an origin of the clock's own."""

    def now_s(self) -> float: ...


class WallClock:
    """The machine's monotonic clock."""

    def now_s(self) -> float:
        return time.monotonic()
