"""State a cascade's promise as counts: how many misses a table may have, and how many differing rows a sample may show.

The counting rule: let c be the largest number for which ``chance(c, budget + 1, q)`` is at most 1 − confidence. Walk
down the rows by score, and stop at the (c + 1)-th sampled row that differs. If more than ``budget`` kept rows differed,
then at most c of the first budget + 1 + c rows that differ would be sampled. The coins do not decide which rows these
are, so that this is as improbable as ``chance`` says: for every table, every score and every order of rows.
Sources: rectifying inspection (Dodge and Romig, 1941), the exact binomial bound (Clopper and Pearson, 1934), and
risk-controlling prediction sets (arXiv:2101.02703), here over the coins instead of a population.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

from pipemax_spark.cascade.beta import chance

_MAX_SAMPLE_SHARE = 1 / 3
_SAMPLE_FACTOR = 0.6
"""The cost is flat around this size; any other size is as valid."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Promise:
    """With probability ``confidence``, at most a share of 1 − ``agree`` of the rows are misses."""

    agree: float
    """The share of final answers that are the large model's, above 0 and below 1."""
    confidence: float
    """The probability, over the seed of the coins only, above 0 and below 1."""

    def __post_init__(self) -> None:
        if self.agree == 1:
            raise ValueError(
                "agree is 1: no sample can promise that all answers agree; give less, such as 0.99, or leave the "
                "cascade out"
            )
        for name, value in (("agree", self.agree), ("confidence", self.confidence)):
            if not 0 < value < 1:
                raise ValueError(f"{name} is {value}; give a share above 0 and below 1, such as 0.95")

    @property
    def risk(self) -> float:
        """1 − confidence as written in decimals: 0.05 of 0.95, which floats make 0.050000000000000044."""
        return float(1 - _decimal(self.confidence))

    def of_each(self, number: int) -> "Promise":
        """Return the promise of each of so many columns, which hold together with this one's confidence."""
        return self if number == 1 else Promise(agree=self.agree, confidence=1 - self.risk / number)

    def budget(self, rows: int) -> int:
        """Return how many of so many rows may be misses: the largest whole number within the share."""
        return int((1 - _decimal(self.agree)) * rows)

    def default_sample_share(self, rows: int) -> float:
        """Return the coins' probability that is near the cheapest: 0.6·(rows²/(1 − agree))^⅓ rows, at most a third."""
        if rows < 1:
            raise ValueError(f"a cascade needs a row at least, got {rows}")
        sampled_rows = _SAMPLE_FACTOR * math.cbrt(rows**2 / float(1 - _decimal(self.agree)))
        return min(_MAX_SAMPLE_SHARE, sampled_rows / rows)

    def allowed_differing(self, rows: int, sample_share: float) -> int | None:
        """Return how many sampled rows above the threshold may differ; None if no threshold can hold."""
        budget, risk = self.budget(rows), self.risk
        return last_true(lambda differing: chance(differing, budget + 1, sample_share) <= risk)

    def bound_misses(self, differing: int, sample_share: float) -> int:
        """Return the upper bound of the misses, where ``differing`` sampled rows above the threshold differ."""
        risk = self.risk
        bound = last_true(lambda misses: chance(differing, misses, sample_share) > risk)
        assert bound is not None, "the chance of no miss is 1"
        return bound


def last_true(test: Callable[[int], bool]) -> int | None:
    """Return the largest integer from 0 that passes a test, which no larger one passes; None if 0 fails."""
    if not test(0):
        return None
    low, step = 0, 1
    while test(low + step):
        low, step = low + step, 2 * step
    while step > 1:
        step //= 2
        low += step if test(low + step) else 0
    return low


def _decimal(share: float) -> Fraction:
    """Return a share as it is written, so that 0.03 of 10⁹ rows is 30,000,000 and not one less."""
    return Fraction(repr(float(share)))
