"""Decide the limits of a running engine's steps: sweep, model, race, settled.

The serving loop feeds the tuner about once a second with what its engines did, and gives them the limits that come
back. The tuner reads no clock: seconds are those of the steps. It runs neither threads nor an engine, and a call takes
about a tenth of a second at most. Everything is decided on the table's own rows, each of which is computed once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from pipemax.domain.step_records import StepLimits, StepRecords
from pipemax.tuning.blocks import Block, BlockPlan
from pipemax.tuning.prediction import Prediction
from pipemax.tuning.race import Rival
from pipemax.tuning.race_run import RaceRun, planned_race
from pipemax.tuning.rules import TuningRules, residence_s
from pipemax.tuning.step_fit import StepFit, WorkCosts, fit_steps
from pipemax.tuning.table import (
    SWEEP_ROWS,
    SWEEP_TOKENS,
    Envelope,
    Lengths,
    row_candidates,
    sweep_limits,
    token_candidates,
)
from pipemax.tuning.tuned import Tuned

_MAX_LENGTHS = 50_000
_ROWS_TO_PREDICT = 64
_MOST_LONGER = 0.03
"""Share of rows that may be longer than all that ended, when lengths are taken as known."""
_TIMES_DEFAULT = 5
"""Settings' time at the end of the sweep for the default: its rows pass all numbers between."""
_STEPS_A_CALL = 2000
"""Steps simulated in a call: about a tenth of a second."""
_CHECK_PAIRS = 2
"""Of a remembered tuning with the default."""


class Stage(StrEnum):
    """What the tuner is doing."""

    CHECK = "check"
    SWEEP = "sweep"
    MODEL = "model"
    RACE = "race"
    SETTLED = "settled"


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """The limits with which a tuning begins, where they are not the default."""

    limits: StepLimits
    costs: WorkCosts | None = None
    """Of a remembered tuning, which two pairs then compare with the default; ``None``: only simulated."""


class Tuner:
    """The state of one tuning. ``tuned`` is its result, once it has settled."""

    def __init__(
        self,
        envelope: Envelope,
        *,
        num_replicas: int = 1,
        start: Start | None = None,
        rules: TuningRules | None = None,
    ) -> None:
        if num_replicas < 1:
            raise ValueError(f"num_replicas is {num_replicas}, must be at least 1")
        self.tuned: Tuned | None = None
        self.stage = Stage.SWEEP
        self.costs: WorkCosts | None = None if start is None else start.costs
        self._envelope, self._rules, self._num_replicas = envelope, rules or TuningRules(), num_replicas
        self._start = envelope.default
        if start is not None:
            self._start = envelope.limits(start.limits.step_tokens, start.limits.running_rows)
        self._lengths = Lengths()
        self._outputs_so_far = np.zeros(0, dtype=np.int64)
        self._seconds = self._spent_s = 0.0
        self._records: list[StepRecords] = []
        self._waited: list[StepRecords] = []  # while rows were waited for
        self._levels: list[tuple[float, float | None] | None] = [
            *((rows, tokens) for rows in SWEEP_ROWS for tokens in SWEEP_TOKENS),
            *[None] * _TIMES_DEFAULT,
        ]
        self._limits = [self._start] * num_replicas
        self._block: Block | None = None
        self._fit: StepFit | None = None
        self._to_simulate: list[StepLimits] = []
        self._prediction: Prediction | None = None
        self._has_rows = False  # all candidates that differ in rows were simulated
        self._rates: dict[StepLimits, float] = {}
        self._run: RaceRun | None = None
        self._is_large = False  # the predicted gain
        self._is_brief = False  # the blocks of the race
        if self.costs is not None:
            self.stage = Stage.CHECK
            if self._start == envelope.default:
                self._settle(self._start, why="it was best before")

    def observe(
        self, records: Sequence[StepRecords], ended: Lengths, *, expected_s: float
    ) -> Sequence[StepLimits]:
        """Take what happened since the last call, and return the limits of each replica from now on.

        ``records`` has an entry for each replica, of no steps if it made none. ``ended``: rows that ended without an
        error. ``expected_s``: seconds that the rest of the table is expected to take.
        """
        if len(records) != self._num_replicas:
            raise ValueError(f"records of {len(records)} replicas, but there are {self._num_replicas}")
        if self.tuned is not None:
            return self._limits
        passed_s = max(float(np.nansum(steps.seconds)) for steps in records)
        self._seconds += passed_s
        self._spent_s += 0.0 if self.stage is Stage.MODEL else passed_s
        self._outputs_so_far = np.concatenate([steps.outputs_so_far for steps in records])
        if self._fit is None:
            self._lengths = self._lengths.joined(ended, max_rows=_MAX_LENGTHS)
        match self.stage:
            case Stage.SWEEP:
                self._sweep(records, expected_s)
            case Stage.MODEL:
                self._model(records, expected_s)
            case Stage.CHECK:
                self._check(records, expected_s)
            case Stage.RACE:
                self._race(records, expected_s)
        return self._limits

    @property
    def faults(self) -> Sequence[str]:
        """Why blocks of the race were thrown away."""
        return () if self._run is None else self._run.faults

    def _budget_left_s(self, expected_s: float) -> float:
        table_s = self._seconds + expected_s
        return self._rules.budget_s(table_s, is_large=self._is_large) - self._spent_s

    # The sweep.

    def _sweep(self, records: Sequence[StepRecords], expected_s: float) -> None:
        self._records += [steps for steps in records if len(steps)]
        if self._seconds + expected_s < self._rules.least_table_s:
            self._settle(self._start, why="the table is too short to try others")
            return
        if self._block is not None:
            self._block.add(records)
            if not self._block.is_complete:
                return
        if not self._levels or self._budget_left_s(expected_s) < self._rules.sweep_setting_s:
            self._limits = [self._start] * self._num_replicas
            self.stage = Stage.MODEL
            return
        turn, self._levels = self._levels[: self._num_replicas], self._levels[self._num_replicas :]
        levels = [turn[index % len(turn)] for index in range(self._num_replicas)]
        limits = tuple(
            sweep_limits(self._envelope, self._lengths, *level) if level else self._envelope.default
            for level in levels
        )
        self._block = Block(BlockPlan(limits=limits, washout_s=0.0, measured_s=self._rules.sweep_setting_s))
        self._limits = [*limits]

    # The model.

    def _model(self, records: Sequence[StepRecords], expected_s: float) -> None:
        if self._fit is None:
            self._waited += [steps for steps in records if len(steps)]
            rows, longer = self._lengths.of_the_table(self._outputs_so_far)
            is_late = self._seconds > self._rules.max_wait_share * (self._seconds + expected_s)
            enough = max(_ROWS_TO_PREDICT, 0 if is_late else len(self._outputs_so_far))
            if len(rows) < enough or (longer > _MOST_LONGER and not is_late):
                if is_late:
                    self._settle(self._start, why="rows take too long to know their lengths")
                return
            self._lengths = rows
            steps = StepRecords.joined([*self._records, *self._waited])
            self._fit = fit_steps(steps, prompts_per_output=self._lengths.prompts_per_output)
            if self._fit is None:
                self._settle(self._start, why="too few steps were made to know their times")
                return
            self.costs, self._records = self._fit.costs, []
            self._to_simulate = [*row_candidates(self._envelope, self._lengths)]
        elif self._to_simulate or self._prediction is not None:
            self._simulate(self._fit)
        else:
            self._choose_rivals(expected_s)

    def _simulate(self, fit: StepFit) -> None:
        """Go on with the simulation of a candidate: first of all that differ in rows, then of steps with the best."""
        if self._prediction is None:
            limits = self._to_simulate.pop(0)
            self._prediction = Prediction(fit, self._envelope, self._lengths, limits)
        rate = self._prediction.advance(_STEPS_A_CALL)
        if rate is None:
            return
        self._rates[self._prediction.limits] = rate
        self._prediction = None
        if not self._to_simulate and not self._has_rows:
            self._has_rows = True
            best = max(self._rates, key=lambda limits: self._rates[limits])
            others = token_candidates(self._envelope, self._lengths, best.running_rows)
            self._to_simulate = [limits for limits in others if limits not in self._rates]

    def _predicted(self, limits: StepLimits) -> float | None:
        if limits not in self._rates:
            return None
        return float(np.log(self._rates[limits] / self._rates[self._envelope.default]))

    def _choose_rivals(self, expected_s: float) -> None:
        rules, default = self._rules, self._envelope.default
        gains = {limits: float(self._predicted(limits) or 0.0) for limits in self._rates if limits != default}
        order = sorted(gains, key=lambda limits: gains[limits], reverse=True)
        worth = max(rules.worth, rules.worth_errors * (0.0 if self._fit is None else self._fit.error))
        if not order or gains[order[0]] < worth:
            self._settle(default, why=f"no other limits are within reach of {worth:+.1%}")
            return
        best = order[0]
        rivals = list[StepLimits]()
        for limits in order:
            is_near = gains[limits] >= max(gains[best] - rules.near_best, rules.worth / 2)
            if is_near and all(_differ(limits, other) for other in rivals) and len(rivals) < rules.max_rivals:
                rivals.append(limits)
        pairs = self._budget_left_s(expected_s) / self._pair_s(rivals[0])
        rivals, first = rivals[: int(pairs // rules.fewest_pairs)], None
        if not rivals:
            self._is_large, first = gains[best] >= rules.large, self._waited_block()
            for self._is_brief in (False, True):
                pairs = self._budget_left_s(expected_s) / self._pair_s(best) + (0.5 if first else 0.0)
                if pairs >= 1:
                    break
            else:
                self._settle(default, why="a race takes too long for what it may gain")
                return
            rivals, pairs = [best], min(rules.fewest_pairs, pairs)
        self._begin_race(rivals, pairs, first)
        self.stage = Stage.RACE

    # The race.

    def _waited_block(self) -> Block | None:
        """Return the second half of the wait for rows as a block of the default, if it is as long as a block."""
        is_default = self._start == self._envelope.default and self._num_replicas == 1
        steps = StepRecords.joined(self._waited)
        half_s = float(np.nansum(steps.seconds)) / 2
        if not is_default or half_s < self._rules.block_s:
            return None
        block = Block(BlockPlan(limits=(self._start,), washout_s=half_s, measured_s=half_s))
        block.add([steps])
        return None if block.fault() else block

    def _begin_race(self, rivals: Sequence[StepLimits], pairs: float, first: Block | None = None) -> None:
        assert self.costs is not None
        race = planned_race(
            [(limits, self._predicted(limits)) for limits in rivals],
            pairs=pairs,
            num_replicas=self._num_replicas,
        )
        self._run = RaceRun(race, self._envelope.default, self.costs, self._plan, first=first)
        self._limits = [*self._run.limits]

    def _plan(self, rival: StepLimits, limits: tuple[StepLimits, ...], is_changed: bool) -> BlockPlan:
        seconds = residence_s(self._fit, self._envelope, self._lengths, rival)
        return self._rules.block(limits, residence_s=seconds, is_changed=is_changed, is_brief=self._is_brief)

    def _pair_s(self, rival: StepLimits) -> float:
        return 2 * self._plan(rival, (rival,) * self._num_replicas, True).seconds

    def _race(self, records: Sequence[StepRecords], expected_s: float) -> None:
        assert self._run is not None
        verdict = self._run.advance(records, left_s=self._budget_left_s(expected_s))
        self._limits = [*self._run.limits]
        if verdict is not None:
            limits = self._envelope.default if verdict.winner is None else verdict.winner.limits
            self._settle(limits, why=verdict.why, rival=verdict.winner)

    # A remembered tuning.

    def _check(self, records: Sequence[StepRecords], expected_s: float) -> None:
        """Race two pairs. What was best before need not be shown again: it is left only where it loses."""
        left_s = self._budget_left_s(expected_s)
        if self._run is None:
            if left_s < _CHECK_PAIRS * self._pair_s(self._start):
                self._settle(self._start, why="remembered, and the table is too short to check it")
            else:
                self._begin_race([self._start], _CHECK_PAIRS)
            return
        verdict, race = self._run.advance(records, left_s=left_s), self._run.race
        self._limits = [*self._run.limits]
        if verdict is None and race.num_pairs < _CHECK_PAIRS:
            return
        (rival,) = race.rivals
        if rival.units and rival.estimate().mean < 0:
            self._run, self.stage, self._start = None, Stage.SWEEP, self._envelope.default
            self._limits = [self._start] * self._num_replicas
        else:
            self._settle(self._start, why="remembered", rival=rival)

    def _settle(self, limits: StepLimits, *, why: str, rival: Rival | None = None) -> None:
        raced = rival is not None and bool(rival.units)
        self.tuned = Tuned(
            limits=limits,
            is_default=limits == self._envelope.default,
            gain=rival.estimate() if rival is not None and raced else None,
            predicted_gain=self._predicted(limits),
            seconds=self._seconds,
            pairs=0 if self._run is None else self._run.race.num_pairs,
            why=why,
        )
        self.stage = Stage.SETTLED
        self._limits = [limits] * self._num_replicas
        self._block, self._records, self._waited = None, [], []


def _differ(one: StepLimits, other: StepLimits) -> bool:
    """Tell whether two rivals differ by enough to be raced both."""
    tokens = max(one.step_tokens, other.step_tokens) / min(one.step_tokens, other.step_tokens)
    rows = max(one.running_rows, other.running_rows) / min(one.running_rows, other.running_rows)
    return tokens >= 1.3 or rows >= 1.15
