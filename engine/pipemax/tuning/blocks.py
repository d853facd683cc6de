"""A block: some seconds of every replica under limits that do not change, of which the first part is not measured."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pipemax.domain.step_records import StepLimits, StepRecords
from pipemax.tuning.step_fit import WorkCosts

_ENOUGH_WAITING = 0.1
"""Rows that wait, as a share of those that run: with fewer, a step may lack rows and not room."""
_MAX_STARVED = 0.05
"""Share of the steps that may have fewer."""
_STALL = 20.0
"""A step that takes as many times the median, and more than a second, was not the engine's."""
_STALL_S = 1.0
_STORM = 0.02
"""Rows preempted in a step, as a share of those that run, averaged over the block."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockPlan:
    """What a block runs, and for how long."""

    limits: tuple[StepLimits, ...]
    """Of each replica."""
    washout_s: float
    """Not measured: rows that began under other limits are still running."""
    measured_s: float

    @property
    def seconds(self) -> float:
        return self.washout_s + self.measured_s


class Block:
    """Collects the records of one block; its clock is that of the replica that is furthest ahead."""

    def __init__(self, plan: BlockPlan) -> None:
        self.plan = plan
        self._elapsed_s = [0.0] * len(plan.limits)
        self._records: list[list[StepRecords]] = [[] for _ in plan.limits]
        self._was_idle = False

    def add(self, records: Sequence[StepRecords]) -> None:
        """Take the replicas' next steps."""
        for index, steps in enumerate(records):
            seconds = np.nan_to_num(steps.seconds)
            ends = self._elapsed_s[index] + np.cumsum(seconds)
            measured = ends > self.plan.washout_s
            if measured.any():
                part = steps.since(int(np.argmax(measured)))
                self._was_idle |= bool(np.isnan(part.seconds).any())
                self._records[index].append(part)
            self._elapsed_s[index] += float(seconds.sum())

    @property
    def num_steps(self) -> list[int]:
        """Measured steps of each replica."""
        return [sum(map(len, parts)) for parts in self._records]

    @property
    def is_complete(self) -> bool:
        """Tell whether the block is long enough. A replica that makes no steps holds it up no longer than its time."""
        return max(self._elapsed_s) >= self.plan.seconds

    def fault(self) -> str | None:
        """Return why the block says nothing about its limits, ``None`` if it does."""
        if self._was_idle:
            return "an engine had nothing to do"
        if not min(self.num_steps) or min(self._elapsed_s) < max(self._elapsed_s) / 2:
            return "a replica made no steps"
        for parts in self._records:
            steps = StepRecords.joined(parts)
            if np.mean(steps.waiting < _ENOUGH_WAITING * steps.running) > _MAX_STARVED:
                return "too few rows were waiting"
            if steps.seconds.max() > max(_STALL_S, _STALL * float(np.median(steps.seconds))):
                return "a step stalled"
            if steps.preempted.sum() > _STORM * steps.running.sum():
                return "rows were preempted again and again"
        return None

    def log_rates(self, costs: WorkCosts) -> list[float]:
        """Return the logarithm of each replica's work per second; the block must have no fault."""
        rates = []
        for parts in self._records:
            steps = StepRecords.joined(parts)
            rates.append(float(np.log(max(1e-9, costs.work_s(steps)) / steps.seconds.sum())))
        return rates
