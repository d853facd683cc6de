"""Account for an engine's time: every second since its start belongs to exactly one part.

This is plain arithmetic over instants that the caller gives; it knows neither engines nor clocks.
"""

import threading
from collections.abc import Mapping
from enum import StrEnum


class TimePart(StrEnum):
    """An engine's activity."""

    START_UP = "start_up"  # loading the model, until the first request can be taken
    WAITING_FOR_INPUT = "waiting_for_input"  # no request to work on, or a prefill phase that waits for more
    PREFILL = "prefill"
    DECODE = "decode"
    PREFETCH_STALL = "prefetch_stall"  # decode that waits for KV on its way from the host
    DRAIN = "drain"  # decode once nothing waits and nothing more will come: the batches shrink


class TimeAccount:
    """The seconds of each part. Thread-safe."""

    def __init__(self, start_s: float) -> None:
        self._lock = threading.Lock()
        self._charged_until_s = start_s
        self._seconds = dict.fromkeys(TimePart, 0.0)

    def charge(self, now_s: float, shares: Mapping[TimePart, float]) -> None:
        """Charge all time since the last charge to these parts, in proportion to their shares."""
        total = sum(shares.values())
        assert total > 0, shares
        with self._lock:
            span_s = max(0.0, now_s - self._charged_until_s)
            self._charged_until_s += span_s
            for part, share in shares.items():
                self._seconds[part] += span_s * share / total

    def span_s(self, now_s: float) -> float:
        """Return the seconds that are not yet charged."""
        with self._lock:
            return max(0.0, now_s - self._charged_until_s)

    def seconds(self) -> dict[TimePart, float]:
        """Return the seconds of each part; they add up to the time from the start to the last charge."""
        with self._lock:
            return dict(self._seconds)
