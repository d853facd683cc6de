"""Measure at which rate an endpoint answers while so many requests are open.

The rate follows from Little's law: the mean number of open requests times the work of an answer per second of its
latency. Where latency is in proportion to work, as with tokens that are decoded, a few answers of very unequal lengths
already say it. Knows nothing of requests, limits or clocks.
"""

import math


class RateMeasure:
    """The rate at one level, from requests that began once so many were open."""

    def __init__(self, level: int) -> None:
        self.level = level
        self.num_answers = 0
        self._since_s: float | None = None
        self._seen_s = 0.0
        self._open_seconds = 0.0
        self._work = self._latency_s = 0.0
        self._work_squares = self._latency_squares = self._products = 0.0

    def advance(self, now_s: float, num_open: int) -> None:
        """Count the time since the last call, in which ``num_open`` requests were open."""
        if self._since_s is not None:
            self._open_seconds += num_open * (now_s - self._seen_s)
        elif num_open >= self.level:
            # The requests that fill a level come at once and wait less than later ones will.
            self._since_s = now_s
        self._seen_s = now_s

    def add(self, now_s: float, latency_s: float, work: float) -> None:
        """Count an answer, unless its request began before the level was full."""
        if self._since_s is None or now_s - latency_s < self._since_s:
            return
        self.num_answers += 1
        self._work += work
        self._latency_s += latency_s
        self._work_squares += work * work
        self._latency_squares += latency_s * latency_s
        self._products += work * latency_s

    @property
    def is_full(self) -> bool:
        """Whether about as many requests were open as the level allows: otherwise it says nothing of the level."""
        return self._mean_open >= 0.85 * self.level

    @property
    def rate(self) -> float:
        """Work per second; 0 before the first answer."""
        return self._mean_open * self._work / self._latency_s if self._latency_s > 0 else 0.0

    @property
    def relative_error(self) -> float:
        """The standard error of the rate, as a share of it.

        It is the smaller of two: that of the ratio of work and latency, and that of counted work, which depends on
        how much of it was under way at the beginning and at the end. Where answers are only counted, how unequal
        they are adds to it.
        """
        if self.num_answers < 2 or self._work <= 0 or self._latency_s <= 0:
            return math.inf
        per_work_s = self._latency_s / self._work
        squares = self._latency_squares - 2 * per_work_s * self._products + per_work_s**2 * self._work_squares
        of_ratio = math.sqrt(max(0.0, squares)) / self._latency_s
        mean_square = self.num_answers * self._work_squares / self._work**2
        of_count = math.sqrt(mean_square * 2 * self.level) / self.num_answers
        # Answers that all count the same are as unequal as if their lengths were exponential.
        of_lengths = 1 / math.sqrt(self.num_answers) if mean_square < 1 + 1e-9 else 0.0
        return math.hypot(min(of_ratio, of_count), of_lengths)

    @property
    def _mean_open(self) -> float:
        seconds = 0.0 if self._since_s is None else self._seen_s - self._since_s
        return self._open_seconds / seconds if seconds > 0 else 0.0
