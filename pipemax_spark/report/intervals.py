"""Say how far chance may be off where some rows stand for many: the interval of a share, and a test of pairs."""

import math

_Z_95 = 1.959964
"""The normal distribution's quantile for an interval at 95 %."""


def share_interval(rows: int, total: int) -> tuple[float, float]:
    """Return the interval at 95 % of a share of which ``rows`` of ``total`` were seen, ``total`` at least 1.

    Wilson, "Probable inference, the law of succession, and statistical inference" (1927): unlike the one of the normal
    distribution it stays within 0 and 1, and holds for few rows and for shares near 0 and 1.
    """
    share, square = rows / total, _Z_95**2 / total
    centre = (share + square / 2) / (1 + square)
    half = _Z_95 * math.sqrt(share * (1 - share) / total + square / (4 * total)) / (1 + square)
    return max(0.0, centre - half), min(1.0, centre + half)


def share_text(rows: int, total: int) -> str:
    """Return a share of rows with its interval, as text."""
    low, high = share_interval(rows, total)
    return f"{rows / total:.1%} (95 %: {low:.1%} to {high:.1%})"


def mcnemar_p(only_first: int, only_second: int) -> float:
    """Return how probable it is that two equally good prompts differ in so many rows, or more, by chance.

    ``only_first`` and ``only_second`` are the rows that only one of the two answers rightly. The test is McNemar's
    (1947) in its exact form: under equal accuracy each of these rows is a coin's throw. Two-sided, from 0 to 1.
    """
    rows = only_first + only_second
    tail = sum(math.comb(rows, heads) for heads in range(min(only_first, only_second) + 1))
    return min(1.0, tail / 2 ** (rows - 1)) if rows else 1.0
