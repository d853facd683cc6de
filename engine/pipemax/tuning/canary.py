"""Try n-gram speculation on one replica, the canary, and decide by its rate whether the others get it too.

A gain cannot be predicted from steps without speculation, so it is measured: the output tokens per second of one
replica over those of the others in the same blocks of time, before it has speculation and with it. What differs
between replicas, and what the table's rows change for all, cancels. This module knows neither processes nor engines.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import fmean
from typing import Any, Self

from pipemax.domain.step_records import StepLimits
from pipemax.tuning.race import Estimate, Rival
from pipemax.tuning.tuned import gain_text

_NO_LIMITS = StepLimits(step_tokens=1, running_rows=1)
"""A rival of the race has limits; nobody looks at these."""
_MAX_STARVED = 0.2
"""Share of looks at which a replica may have fewer rows waiting than a tenth of those that run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryRules:
    """When a trial is worth its restarts, and what it takes to be believed."""

    expected_gain: float = 0.2
    """What speculation is taken to gain before it was tried, as a share of the rate…"""
    restarts: float = 20.0
    """…which must be worth as many restarts of all replicas over the rest of the table."""
    restarts_back: float = 4.0
    """A canary that lost is left as it is if the rest of the table takes fewer restarts than this."""
    worth: float = math.log(1.05)
    """The gain that must be beyond doubt, as the logarithm of a ratio of rates."""
    pairs: int = 8
    """Most pairs of blocks, one before and one with speculation."""
    block_s: float = 20.0
    """A block lasts as long, or as long as a row runs; nothing is measured for two blocks after a change."""
    max_share: float = 0.25
    """All blocks take at most this share of the rest of the table."""
    max_faults: int = 4
    """Useless blocks in a row, after which the trial ends."""

    def are_worth_a_change(self, gain: float, *, start_s: float, left_s: float) -> bool:
        """Tell whether a gain, as a share of the rate, pays for starting all replicas again."""
        return gain * left_s >= self.restarts * start_s


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaSeen:
    """A replica at one instant, of what ``Engine.stats`` says of each."""

    number: int
    is_up: bool
    speculates: bool
    restarts: int
    start_s: float
    output_tokens: float
    """Of all rows so far, as they are generated."""
    running: int
    waiting: int

    @classmethod
    def of(cls, figures: Mapping[str, Any]) -> Self:
        return cls(
            number=figures["replica"],
            is_up=figures["state"] == "up",
            running=figures["running_requests"],
            # vLLM does not count rows whose grammar is being made.
            waiting=max(0, figures["rows"] - figures["running_requests"]),
            **{name: figures[name] for name in ("speculates", "restarts", "start_s", "output_tokens")},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """What a trial came to."""

    is_taken: bool
    gain: Estimate | None
    """As the logarithm of a ratio of rates; None where no rates could be compared."""
    why: str

    def __str__(self) -> str:
        if self.gain is None:
            return f"n-gram speculation: {self.why}"
        return f"n-gram speculation: {gain_text(self.gain)}, {self.why}"


class Stage(StrEnum):
    """What a trial is doing."""

    BEFORE = "before"
    STARTING = "starting"
    WITH = "with"
    ENDED = "ended"


class Canary:
    """One trial. ``speculating`` are the replicas that are to speculate from now on, ``result`` comes with its end."""

    def __init__(self, rules: CanaryRules | None = None) -> None:
        self.speculating: frozenset[int] = frozenset()
        self.result: Speculation | None = None
        """None before the end, and where nothing was tried…"""
        self.why_untried = ""
        """…for this reason."""
        self.stage = Stage.BEFORE
        self._rules = rules or CanaryRules()
        self._before: list[float] = []
        self._rival = Rival(limits=_NO_LIMITS, predicted=None, planned_units=self._rules.pairs)
        self._block: _Block | None = None
        self._is_settling = True
        self._faults = self._restarts = 0

    def observe(
        self, replicas: Sequence[ReplicaSeen], *, left_s: float, residence_s: float, now_s: float
    ) -> bool:
        """Take two replicas or more as they are now; return whether the trial has ended.

        ``left_s``: seconds that the rest of the table is expected to take. ``residence_s``: how long a row runs.
        """
        canary = replicas[-1]
        match self.stage:
            case Stage.BEFORE if any(replica.speculates for replica in replicas):
                self._block = None  # from a job before: they are on their way back
            case Stage.STARTING if canary.is_up and canary.speculates:
                self.stage, self._is_settling = Stage.WITH, True
            case Stage.STARTING if canary.is_up and canary.restarts > self._restarts + 1:
                self._lose("it does not start here", canary, left_s)
            case Stage.WITH if not canary.speculates:
                self._lose("the replica that tried it ended", canary, left_s)
            case Stage.BEFORE | Stage.WITH:
                self._look(replicas, left_s, residence_s, now_s)
        return self.stage is Stage.ENDED

    def _look(self, replicas: Sequence[ReplicaSeen], left_s: float, residence_s: float, now_s: float) -> None:
        if self._block is None:
            self._block = _Block(replicas, now_s)
            return
        self._block.look(replicas)
        length_s = max(self._rules.block_s, residence_s)
        if now_s - self._block.begin_s < length_s * (2 if self._is_settling else 1):
            return
        block, self._block = self._block, None
        fault = block.fault(replicas)
        self._faults = 0 if fault is None else self._faults + 1
        if self._is_settling:
            self._is_settling = fault is not None
        elif fault is None:
            self._take(block.log_ratio(replicas), replicas, left_s, length_s)
        if self._faults == self._rules.max_faults and self.stage is not Stage.ENDED:
            if self.stage is Stage.BEFORE:
                self._leave(f"rates could not be compared: {fault}")
            else:
                self._lose(f"rates could not be compared: {fault}", replicas[-1], left_s)

    def _take(
        self, log_ratio: float, replicas: Sequence[ReplicaSeen], left_s: float, length_s: float
    ) -> None:
        """Take the logarithm of the canary's rate over the mean of the others', over a block."""
        rules, canary = self._rules, replicas[-1]
        if self.stage is Stage.BEFORE:
            self._before.append(log_ratio)
            if len(self._before) < rules.pairs:
                return
            trial_s = (rules.pairs + 2) * length_s
            start_s = max(replica.start_s for replica in replicas)
            if trial_s > rules.max_share * left_s:
                self._leave(f"{trial_s:.0f} s for a trial are too much of the {left_s:.0f} s that are left")
                return
            if not rules.are_worth_a_change(rules.expected_gain, start_s=start_s, left_s=left_s):
                self._leave(f"the {left_s:.0f} s that are left are not worth a start of {start_s:.0f} s")
                return
            self.stage, self._restarts = Stage.STARTING, canary.restarts
            self.speculating = frozenset({canary.number})
            return
        self._rival.units.append(log_ratio - self._before[len(self._rival.units)])
        gain = self._rival.estimate()
        if gain.low >= rules.worth:
            self.speculating = frozenset(replica.number for replica in replicas)
            self.result = Speculation(is_taken=True, gain=gain, why="taken")
            self.stage = Stage.ENDED
        elif gain.high < rules.worth or len(self._rival.units) == rules.pairs:
            self._lose("not taken", canary, left_s, gain)

    def _leave(self, why: str) -> None:
        self.why_untried, self.stage = why, Stage.ENDED

    def _lose(self, why: str, canary: ReplicaSeen, left_s: float, gain: Estimate | None = None) -> None:
        self.result = Speculation(is_taken=False, gain=gain, why=why)
        if left_s >= self._rules.restarts_back * canary.start_s:
            self.speculating = frozenset()
        self.stage = Stage.ENDED


class _Block:
    """A stretch of time in which no replica changes."""

    def __init__(self, replicas: Sequence[ReplicaSeen], begin_s: float) -> None:
        self.begin_s = begin_s
        self._first = replicas
        self._looks = self._starved = 0
        self._was_away = False

    def look(self, replicas: Sequence[ReplicaSeen]) -> None:
        self._looks += 1
        self._starved += not all(10 * replica.waiting >= replica.running > 0 for replica in replicas)
        self._was_away |= not all(replica.is_up for replica in replicas)

    def fault(self, replicas: Sequence[ReplicaSeen]) -> str | None:
        """Return why the block compares nothing; None if it does."""
        pairs = zip(self._first, replicas, strict=True)
        if self._was_away or any(old.restarts != new.restarts for old, new in pairs):
            return "a replica was away"
        if self._starved > _MAX_STARVED * self._looks:
            return "too few rows were waiting"
        return None

    def log_ratio(self, replicas: Sequence[ReplicaSeen]) -> float:
        pairs = zip(self._first, replicas, strict=True)
        *others, canary = (max(1.0, new.output_tokens - old.output_tokens) for old, new in pairs)
        return math.log(canary / fmean(others))
