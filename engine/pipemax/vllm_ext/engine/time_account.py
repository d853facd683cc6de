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
    DRAIN = "drain"  # decode once nothing waits or is parked and nothing more will come: the batches shrink


_COMPUTING = (TimePart.PREFILL, TimePart.DECODE, TimePart.PREFETCH_STALL)


class TimeAccount:
    """The seconds of each part, and how long the drain would have been at the full rate. Thread-safe."""

    def __init__(self, start_s: float) -> None:
        self._lock = threading.Lock()
        self._charged_until_s = start_s
        self._seconds = dict.fromkeys(TimePart, 0.0)
        self._full_rate_tokens = 0
        """Output tokens of all that is no drain."""
        self._drain_at_full_rate_s = 0.0

    def charge(self, now_s: float, shares: Mapping[TimePart, float], *, output_tokens: int = 0) -> None:
        """Charge all time since the last charge to these parts, in proportion to their shares.

        ``output_tokens`` came in that time.
        """
        total = sum(shares.values())
        assert total > 0, shares
        with self._lock:
            span_s = max(0.0, now_s - self._charged_until_s)
            self._charged_until_s += span_s
            for part, share in shares.items():
                self._seconds[part] += span_s * share / total
            if shares.get(TimePart.DRAIN):
                drain_s = span_s * shares[TimePart.DRAIN] / total
                self._drain_at_full_rate_s += min(drain_s, self._at_full_rate_s(output_tokens, drain_s))
            else:
                self._full_rate_tokens += output_tokens

    def _at_full_rate_s(self, drain_tokens: int, drain_s: float) -> float:
        """Return how long a drain's tokens take at the rate of all others; ``drain_s`` if there were none."""
        if not self._full_rate_tokens:
            return drain_s
        computing_s = sum(self._seconds[part] for part in _COMPUTING)
        return drain_tokens * computing_s / self._full_rate_tokens

    def span_s(self, now_s: float) -> float:
        """Return the seconds that are not yet charged."""
        with self._lock:
            return max(0.0, now_s - self._charged_until_s)

    def figures(self) -> dict[str, float]:
        """Return the account by the names of an engine's figures, all as of the last charge.

        The seconds of the parts add up to the time from the start to the last charge.
        """
        with self._lock:
            figures = {f"time_{part}_s": seconds for part, seconds in self._seconds.items()}
            return figures | {"drain_at_full_rate_s": self._drain_at_full_rate_s}
