"""Run a race in blocks: which limits come next on which replica, and what a pair of blocks said."""

from collections.abc import Callable, Sequence

from pipemax.domain.step_records import StepLimits, StepRecords
from pipemax.tuning.blocks import Block, BlockPlan
from pipemax.tuning.race import Race, Rival, Verdict
from pipemax.tuning.step_fit import WorkCosts

MAX_FAULTS = 4
"""Useless blocks in a row, after which the race ends."""

Planner = Callable[[StepLimits, tuple[StepLimits, ...], bool], BlockPlan]
"""Plans a block: the rival's limits, each replica's, and whether those differ from the limits of the block before."""


class RaceRun:
    """One race under way. ``limits`` are each replica's."""

    def __init__(
        self, race: Race, default: StepLimits, costs: WorkCosts, plan: Planner, *, first: Block | None = None
    ) -> None:
        """``first``: a block of the default that has been run already, where all replicas begin with it."""
        self.race = race
        self.faults: list[str] = []
        """Why blocks were thrown away."""
        self._default, self._costs, self._plan = default, costs, plan
        self._faults_in_a_row = 0
        self._first_rates = None if first is None else first.log_rates(costs)
        self._block = Block(self._next_plan(before=None))

    @property
    def limits(self) -> tuple[StepLimits, ...]:
        return self._block.plan.limits

    def advance(self, records: Sequence[StepRecords], *, left_s: float) -> Verdict | None:
        """Take the replicas' next steps; return the verdict once there is one. ``left_s``: of the budget."""
        self._block.add(records)
        if left_s <= 0:
            return self.race.end("its time is up")
        if not self._block.is_complete:
            return None
        fault = self._block.fault()
        if fault is None:
            self._faults_in_a_row = 0
            if self._take(self._block.log_rates(self._costs)):
                verdict = self.race.look()
                if (
                    verdict is None
                    and left_s < 2 * self._plan(self.race.rival.limits, self.limits, True).seconds
                ):
                    verdict = self.race.end("its time is up")
                if verdict is not None:
                    return verdict
        else:
            self.faults.append(fault)
            self._faults_in_a_row += 1
            if self._faults_in_a_row == MAX_FAULTS:
                return self.race.end(f"no comparison was possible: {fault}")
        self._block = Block(self._next_plan(before=self.limits))
        return None

    def _take(self, rates: list[float]) -> bool:
        """Take a block's rates; return whether they complete a pair."""
        if self._first_rates is None:
            self._first_rates = rates
            return False
        pairs = zip(self._first_rates, rates, self.race.rival_first(), strict=True)
        self.race.add([one - two if rival_first else two - one for one, two, rival_first in pairs])
        self._first_rates = None
        return True

    def _next_plan(self, *, before: tuple[StepLimits, ...] | None) -> BlockPlan:
        rival, is_second = self.race.rival.limits, self._first_rates is not None
        limits = tuple(rival if first ^ is_second else self._default for first in self.race.rival_first())
        return self._plan(rival, limits, limits != before)


def planned_race(
    rivals: Sequence[tuple[StepLimits, float | None]], *, pairs: float, num_replicas: int
) -> Race:
    """Return a race of rivals, each with its predicted gain, for which there is time for so many pairs in all."""
    units = max(1, int(pairs / len(rivals))) * ((num_replicas + 1) // 2)
    return Race(
        [Rival(limits=limits, predicted=predicted, planned_units=units) for limits, predicted in rivals],
        num_replicas=num_replicas,
    )
