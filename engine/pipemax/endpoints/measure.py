"""Measure at which rate an endpoint answers while so many requests are open.

The rate follows from Little's law: the mean number of open requests times the work of an answer per second of its
latency. Where latency is in proportion to work, as with tokens that are decoded, a few answers of very unequal lengths
already say it. Short requests end first, so a measure that has just begun is biased; ``Rate`` objects are therefore
taken at fixed numbers of rounds, and two levels are compared after as many. Knows nothing of limits or clocks.
"""

import math
from dataclasses import dataclass

ROUNDS = (0.5, 1, 2, 4, 8, 16)
"""After so many times the level's answers a measure notes its rate."""
_MIN_ANSWERS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """Work per second with its standard error, as a share of it."""

    per_s: float
    relative_error: float
    mean_open: float


def gain_of(rate: Rate, before: Rate) -> tuple[float, float]:
    """Return the rate as a multiple of an earlier one, and the standard error of that."""
    gain = rate.per_s / before.per_s if before.per_s > 0 else math.inf
    return gain, gain * math.hypot(rate.relative_error, before.relative_error)


class RateMeasure:
    """The rate at one level, from requests that began once so many were open."""

    def __init__(self, level: int) -> None:
        self.level = level
        self.rates: list[Rate] = []
        """After each number of ``ROUNDS``, as far as these have passed."""
        self._num_answers = 0
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

    def add(self, now_s: float, latency_s: float, work: float) -> bool:
        """Count an answer, unless its request began before the level was full. Return whether a rate was noted."""
        if self._since_s is None or now_s - latency_s < self._since_s:
            return False
        self._num_answers += 1
        self._work += work
        self._latency_s += latency_s
        self._work_squares += work * work
        self._latency_squares += latency_s * latency_s
        self._products += work * latency_s
        if self.is_complete or self._num_answers < max(_MIN_ANSWERS, ROUNDS[len(self.rates)] * self.level):
            return False
        self.rates.append(self._rate())
        return True

    @property
    def is_complete(self) -> bool:
        """Whether the last rate is noted."""
        return len(self.rates) == len(ROUNDS)

    def is_full(self, rate: Rate) -> bool:
        """Return whether about as many requests were open as the level allows; otherwise it says nothing of it."""
        return rate.mean_open >= 0.85 * self.level

    def _rate(self) -> Rate:
        seconds = self._seen_s - self._since_s if self._since_s is not None else 0.0
        mean_open = self._open_seconds / seconds if seconds > 0 else 0.0
        per_s = mean_open * self._work / self._latency_s if self._latency_s > 0 else 0.0
        return Rate(per_s=per_s, relative_error=self._relative_error(), mean_open=mean_open)

    def _relative_error(self) -> float:
        """Return the smaller of two errors, with that of the lengths where answers are only counted.

        The first is that of the ratio of work and latency, the second that of counted work, which depends on how much
        was under way at the beginning and at the end.
        """
        if self._work <= 0 or self._latency_s <= 0:
            return math.inf
        per_work_s = self._latency_s / self._work
        squares = self._latency_squares - 2 * per_work_s * self._products + per_work_s**2 * self._work_squares
        of_ratio = math.sqrt(max(0.0, squares)) / self._latency_s
        mean_square = self._num_answers * self._work_squares / self._work**2
        of_count = math.sqrt(mean_square * 2 * self.level) / self._num_answers
        # Answers that all count the same are as unequal as if their lengths were exponential.
        of_lengths = 1 / math.sqrt(self._num_answers) if mean_square < 1 + 1e-9 else 0.0
        return math.hypot(min(of_ratio, of_count), of_lengths)
