"""Race rival limits against the default on the table's own rows, in pairs of neighbouring blocks.

The unit is the logarithm of the ratio of two neighbouring blocks of one engine, the rival's over the default's, so that
what changes slowly cancels. Pairs alternate (ABBA). Two replicas race at once, one in the opposite order (a crossover),
and their mean is one unit: what both go through cancels too. A stop rule is applied after each look, with bounds that
spend 5 % of error over at most twelve looks (O'Brien and Fleming, 1979); where blocks scatter twice as much as usual,
an equal rival is called faster in 8 of 100 races, not in 3. The race knows neither steps nor a clock.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean

from pipemax.domain.step_records import StepLimits

MAX_LOOKS = 12
_BOUND = 2.096
"""O'Brien and Fleming's constant for twelve looks and 5 % on both sides (Jennison and Turnbull, 2000, table 2.3)."""
_USUAL_PAIR_SD = 0.028
"""Of a pair of blocks whose rates scatter by 2 %…"""
_USUAL_WEIGHT = 4
"""…which counts as much as this many pairs: the scatter of two or three is a poor estimate."""
_WORTH = 0.02
"""A gain beyond this is worth more blocks…"""
_LOSS = -0.01
"""…and a rival that is surely below this is dropped."""
WORTH_A_CHANGE = 0.005
"""A rival that was not shown to be better must look better than the default by this at the end."""
_PREDICTION_SD = 0.015
"""How far a predicted gain may be from the true one."""
_ENOUGH_UNITS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A gain over the default, as the logarithm of a ratio of rates, with its 95 % interval."""

    mean: float
    low: float
    high: float


@dataclass(slots=True, kw_only=True)
class Rival:
    """Limits that race against the default."""

    limits: StepLimits
    predicted: float | None
    """The gain that was simulated, as a logarithm of a ratio; ``None`` without a simulation."""
    planned_units: int
    """Units that the budget allows."""
    units: list[float] = field(default_factory=list)
    """Logarithms of ratios; a unit may be the mean of two replicas."""
    num_looks: int = 0
    is_dropped: bool = False

    def estimate(self) -> Estimate:
        """Return the gain with bounds that hold at every look together."""
        count = len(self.units)
        mean = fmean(self.units)
        squares = sum((unit - mean) ** 2 for unit in self.units) + _USUAL_WEIGHT * _USUAL_PAIR_SD**2
        sd = math.sqrt(squares / (count - 1 + _USUAL_WEIGHT))
        share = min(1.0, count / self.planned_units)
        half = _BOUND / math.sqrt(share) * sd / math.sqrt(count)
        return Estimate(mean=mean, low=mean - half, high=mean + half)

    def weighed_mean(self) -> float:
        """Return the mean of what was measured, in one unit or more, and what was predicted, by how sure each is."""
        if self.predicted is None:
            return fmean(self.units)
        measured_weight, predicted_weight = len(self.units) / _USUAL_PAIR_SD**2, 1 / _PREDICTION_SD**2
        total = measured_weight * fmean(self.units) + predicted_weight * self.predicted
        return total / (measured_weight + predicted_weight)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """How the race ended."""

    winner: Rival | None
    """``None``: the default."""
    why: str


class Race:
    """One race; ``pair`` says which rival comes next and in which order, ``add`` takes the ratios."""

    def __init__(self, rivals: Sequence[Rival], *, num_replicas: int) -> None:
        if not rivals or any(rival.planned_units < 1 for rival in rivals):
            raise ValueError("a race needs rivals with at least one planned unit each")
        self.rivals = list(rivals)
        self._num_replicas = num_replicas
        self._turn = 0
        self._num_pairs = 0

    @property
    def num_pairs(self) -> int:
        """Pairs of blocks raced; replicas that race at once count once."""
        return self._num_pairs

    @property
    def rival(self) -> Rival:
        """The rival of the next pair. Each has two in a row (ABBA)."""
        live = [rival for rival in self.rivals if not rival.is_dropped]
        return live[(self._turn // 2) % len(live)]

    def rival_first(self) -> list[bool]:
        """Return for each replica whether the rival comes first in the next pair."""
        first = self._turn % 2 == 1
        return [first ^ (index % 2 == 1) for index in range(self._num_replicas)]

    def add(self, log_ratios: Sequence[float]) -> None:
        """Take a pair: of each replica, the logarithm of the rival's rate over the default's."""
        assert len(log_ratios) == self._num_replicas, log_ratios
        rival = self.rival
        for index in range(0, self._num_replicas, 2):
            rival.units.append(fmean(log_ratios[index : index + 2]))
        self._turn += 1
        self._num_pairs += 1

    def look(self) -> Verdict | None:
        """Apply the stop rule after a pair; ``None``: race on. A look is due each twelfth of the planned units."""
        due = [
            rival
            for rival in self._live()
            if len(rival.units) * MAX_LOOKS >= (rival.num_looks + 1) * rival.planned_units
        ]
        if not due or self._turn % 2:
            return self._without_rivals()
        for rival in due:
            rival.num_looks = len(rival.units) * MAX_LOOKS // rival.planned_units
            if rival.estimate().high < _LOSS:
                rival.is_dropped, self._turn = True, 0
        return self._without_rivals() or self._settled()

    def end(self, why: str) -> Verdict:
        """Return the best by what was measured and predicted; the default unless it is ``WORTH_A_CHANGE``.

        A rival that enough pairs were not for is left, whatever was predicted; one or two pairs scatter too much.
        """
        raced = [
            rival
            for rival in self._live()
            if rival.units and (len(rival.units) < _ENOUGH_UNITS or fmean(rival.units) > 0)
        ]
        best = max(raced, key=Rival.weighed_mean, default=None)
        if best is None or best.weighed_mean() <= WORTH_A_CHANGE:
            return Verdict(winner=None, why=why)
        return Verdict(winner=best, why=why)

    def _live(self) -> list[Rival]:
        return [rival for rival in self.rivals if not rival.is_dropped]

    def _without_rivals(self) -> Verdict | None:
        return None if self._live() else Verdict(winner=None, why="every rival was slower")

    def _settled(self) -> Verdict | None:
        live = self._live()
        if any(not rival.units for rival in live):
            return None
        estimates = [rival.estimate() for rival in live]
        best = max(range(len(live)), key=lambda index: estimates[index].mean)
        others_high = max(
            (one.high for index, one in enumerate(estimates) if index != best), default=-math.inf
        )
        if estimates[best].low > 0 and others_high <= estimates[best].mean + _WORTH:
            return Verdict(winner=live[best], why="it was shown to be faster")
        if max(one.high for one in estimates) <= _WORTH:
            return Verdict(winner=None, why=f"no rival gains {_WORTH:.0%}")
        if max(rival.weighed_mean() for rival in live) <= WORTH_A_CHANGE:
            return Verdict(winner=None, why="no rival looks better")
        if all(len(rival.units) >= rival.planned_units for rival in live):
            return self.end("all planned blocks were raced")
        return None
