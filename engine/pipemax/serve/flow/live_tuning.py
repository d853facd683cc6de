"""Tune the limits of a running engine on the rows that it answers.

About once a second, what its steps and rows were like goes to ``pipemax.tuning``, and the limits that come back go to
the engine. Only stock vLLM's limits can change while it runs, and only a job whose driver says how many rows are left
is tuned: a tuning takes its time from a table that is long enough. Where there are replicas, one of them then tries
n-gram speculation (``pipemax.tuning.canary``).
"""

import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import reduce
from pathlib import Path
from typing import Protocol

import numpy as np

from pipemax.api import Completion, Engine
from pipemax.config import EngineConfig
from pipemax.domain.errors import EngineDiedError
from pipemax.domain.specs import KvCapacity
from pipemax.domain.step_records import StepLimits, TuningFacts
from pipemax.endpoint_config import AnyConfig
from pipemax.tuning.canary import Canary, CanaryRules, ReplicaSeen, Speculation
from pipemax.tuning.remembered import Entry, TableKind, keep_entry, kind_of, load_entries, nearest_entry
from pipemax.tuning.rules import TuningRules
from pipemax.tuning.step_fit import WorkCosts
from pipemax.tuning.table import Envelope, Lengths
from pipemax.tuning.tuned import Tuned
from pipemax.tuning.tuner import Start, Tuner

log = logging.getLogger(__name__)

RowLengths = tuple[int, int]
"""Tokens of a row's prompt and of its answer."""
_PERIOD_S = 1.0
_ROWS_TO_KNOW_THE_KIND = 64
_LEAST_STEP_TOKENS = 64
MAY_NOT_SPECULATE = "may_not_speculate"
"""The trait of a job with a row that speculation may change."""


class Inputs(Protocol):
    """What a tuning asks of the open streams."""

    def jobs(self) -> frozenset[str]:
        """Return the jobs that send rows."""

    def share_left(self) -> int | None:
        """Return how many more rows of theirs the engine should get; None if a driver has not said it."""

    def traits(self) -> frozenset[str]:
        """Return which of ``TableKind``'s traits, and of ``MAY_NOT_SPECULATE``, some of their rows have had."""


class LiveTuning:
    """The tuning of the engine that runs now, for its present jobs. Called on the engine's thread, but for ``note``."""

    def __init__(
        self,
        inputs: Inputs,
        clock: Callable[[], float] = time.monotonic,
        rules: TuningRules | None = None,
        canary_rules: CanaryRules | None = None,
    ) -> None:
        self._inputs = inputs
        self._clock = clock
        self._rules = rules or TuningRules()
        self._canary_rules = canary_rules or CanaryRules()
        self.note = ""
        """What the last tuning came to, in one line; empty until limits were found, and where there is none."""
        self._engine: Engine | None = None
        self._first_limits: list[StepLimits] = []
        self._jobs: frozenset[str] = frozenset()
        self._tuning: _Tuning | None = None
        self._ended: list[RowLengths] = []
        self._seen_s = float("-inf")

    def learn(self, completions: Sequence[Completion]) -> None:
        """Take rows that have ended."""
        if self._tuning is not None:
            self._ended += [
                (row.prompt_tokens, row.completion_tokens)
                for row in completions
                if row.error is None and row.completion_tokens
            ]

    def see(self, engine: Engine, config: AnyConfig) -> None:
        """Look after the engine's limits, about once a second. Called after each poll."""
        now_s = self._clock()
        if now_s - self._seen_s < _PERIOD_S:
            return
        self._seen_s = now_s
        try:
            self._look(engine, config, now_s)
        except EngineDiedError:
            raise
        except Exception:  # no row depends on it: the engine goes on as it is
            log.exception("the tuning has ended by a fault of its own")
            self._tuning = None
            with contextlib.suppress(Exception):
                self._set_first_limits(engine)

    def _look(self, engine: Engine, config: AnyConfig, now_s: float) -> None:
        jobs = self._inputs.jobs()
        if jobs and (engine is not self._engine or jobs.isdisjoint(self._jobs)):
            self._begin(engine, config, now_s)
        self._jobs = jobs or self._jobs
        rows_left = self._inputs.share_left()
        ended, self._ended = self._ended, []
        if self._tuning is None or rows_left is None:
            return
        has_ended = self._tuning.advance(ended, rows_left, self._inputs.traits(), now_s)
        self.note = self._tuning.note
        if has_ended:
            self._tuning = None

    def _begin(self, engine: Engine, config: AnyConfig, now_s: float) -> None:
        """Begin with an engine or with other jobs, whose rows are of another kind."""
        if engine is not self._engine:
            self._first_limits = engine.limits()
        elif self._first_limits and engine.limits() != self._first_limits:
            self._set_first_limits(engine)
        self._engine, self._ended, self.note = engine, [], ""
        self._tuning = None
        if isinstance(config, EngineConfig) and config.tune and (facts := engine.tuning_facts()) is not None:
            rules = self._rules, self._canary_rules
            self._tuning = _Tuning(engine, config, facts, rules, now_s)

    def _set_first_limits(self, engine: Engine) -> None:
        # A replica that speculates may have been started for less.
        pairs = zip(self._first_limits, engine.most_limits(), strict=True)
        engine.set_limits([limits.within(ceiling) for limits, ceiling in pairs])


class _Tuning:
    """One engine's tuning: from the first rows, whose lengths say what kind of table this is, to its result."""

    def __init__(
        self,
        engine: Engine,
        config: EngineConfig,
        facts: TuningFacts,
        rules: tuple[TuningRules, CanaryRules],
        now_s: float,
    ) -> None:
        self._engine = engine
        self._rules, self._canary_rules = rules
        self._can_speculate = facts.can_speculate
        self._kept_in = Path(facts.kept_in)
        default, ceiling = engine.limits(), engine.most_limits()
        self._envelope = Envelope(
            default=default[0],
            ceiling=reduce(StepLimits.within, ceiling),
            capacity=KvCapacity(block_tokens=facts.block_tokens, gpu_blocks=facts.kv_blocks, host_blocks=0),
            least_step_tokens=min(_LEAST_STEP_TOKENS, default[0].step_tokens),
        )
        self._limits = default
        self.note = ""
        """The result, if anything was tried."""
        self._lengths = Lengths()
        self._traits: set[str] = {"has_lora"} if config.lora else set()
        self._tuner: Tuner | None = None
        self._known: Entry | None = None
        self._canary: Canary | None = None
        self._since_s, self._num_ended = now_s, 0

    def advance(
        self, ended: Sequence[RowLengths], rows_left: int, traits: Iterable[str], now_s: float
    ) -> bool:
        """Take the rows that have ended, and return whether the tuning has. ``traits`` are those of all rows so far."""
        self._traits.update(traits)
        if MAY_NOT_SPECULATE in self._traits:
            self._can_speculate = False
        lengths = _lengths(ended, self._engine.stats().metrics.get("prefix_cache_hit_rate", 0.0))
        self._num_ended += len(ended)
        if self._canary is not None:
            return self._try_speculation(self._canary, rows_left, now_s)
        records = self._engine.take_step_records()
        if self._tuner is None:
            self._lengths = self._lengths.joined(lengths, max_rows=10 * _ROWS_TO_KNOW_THE_KIND)
            if len(self._lengths) < _ROWS_TO_KNOW_THE_KIND or len(records) != len(self._limits):
                return False
            lengths, self._tuner = self._lengths, self._begin()
            log.info("tuning: %s", self._tuner.stage)
        stage = self._tuner.stage
        limits = [*self._tuner.observe(records, lengths, expected_s=self._expected_s(rows_left, now_s))]
        if self._tuner.stage is not stage:
            log.info("tuning: %s", self._tuner.stage)
        if limits != self._limits:
            self._engine.set_limits(limits)
            self._limits = limits
        if self._tuner.tuned is None:
            return False
        log.info("%s", self._tuner.tuned)
        if self._tuner.costs is None:  # nothing was tried, such as on a short table
            return True
        self.note = str(self._tuner.tuned)
        known = None if self._known is None else self._known.speculation
        self._keep(self._tuner.tuned, self._tuner.costs, known)
        return not self._begins_trial(known, self._expected_s(rows_left, now_s))

    def _kind(self) -> TableKind:
        return kind_of(self._lengths, **dict.fromkeys(self._traits - {MAY_NOT_SPECULATE}, True))

    def _begin(self) -> Tuner:
        known = self._known = nearest_entry(load_entries(self._kept_in), self._kind())
        start = None if known is None else Start(limits=known.limits, costs=known.costs)
        return Tuner(self._envelope, num_replicas=len(self._limits), start=start, rules=self._rules)

    def _keep(self, tuned: Tuned, costs: WorkCosts, speculation: Speculation | None) -> None:
        entry = Entry.of(tuned, self._kind(), costs, date=datetime.now(UTC).strftime("%Y-%m-%d"))
        keep_entry(self._kept_in, replace(entry, speculation=speculation))

    def _begins_trial(self, known: Speculation | None, left_s: float) -> bool:
        """Return whether a replica is to try speculation; if its result is known, do what it says."""
        replicas = self._replicas()
        if not self._can_speculate or len(replicas) < 2:
            return False
        start_s = max(replica.start_s for replica in replicas)
        gain = None if known is None or known.gain is None or not known.is_taken else known.gain.mean
        expected = self._canary_rules.expected_gain if gain is None else math.expm1(gain)
        if self._canary_rules.are_worth_a_change(expected, start_s=start_s, left_s=left_s):
            takes = known is not None and known.is_taken
            self._engine.speculate([replica.number for replica in replicas] if takes else [])
            if takes:
                self.note = f"{self.note}; {known}, as remembered"
        if known is None:
            self._canary = Canary(self._canary_rules)
        return self._canary is not None

    def _try_speculation(self, canary: Canary, rows_left: int, now_s: float) -> bool:
        if not self._can_speculate:
            log.info("n-gram speculation is not tried further: it may change a row that has come")
            self._engine.speculate([])
            return True
        before = canary.speculating
        residence_s = self._engine.stats().running_requests * self._seconds_a_row(now_s)
        left_s = self._expected_s(rows_left, now_s)
        has_ended = canary.observe(self._replicas(), left_s=left_s, residence_s=residence_s, now_s=now_s)
        if canary.speculating != before:
            self._engine.speculate(canary.speculating)
        if canary.why_untried:
            log.info("n-gram speculation is not tried: %s", canary.why_untried)
        if canary.result is not None:
            log.info("%s", canary.result)
            self.note = f"{self.note}; {canary.result}"
            assert self._tuner is not None
            assert self._tuner.tuned is not None
            assert self._tuner.costs is not None
            self._keep(self._tuner.tuned, self._tuner.costs, canary.result)
        return has_ended

    def _replicas(self) -> list[ReplicaSeen]:
        return [ReplicaSeen.of(figures) for figures in self._engine.stats().replicas]

    def _expected_s(self, rows_left: int, now_s: float) -> float:
        """Return how long the rows that are left should take, at the rate so far."""
        stats = self._engine.stats()
        rows = rows_left + stats.running_requests + stats.waiting_requests
        return rows * self._seconds_a_row(now_s)

    def _seconds_a_row(self, now_s: float) -> float:
        return (now_s - self._since_s) / max(1, self._num_ended)


def _lengths(ended: Sequence[RowLengths], hit_rate: float) -> Lengths:
    """Return the rows' lengths; each has the share of its prompt in the prefix cache that all rows have."""
    prompts, outputs = np.array(ended, dtype=np.int64).reshape(-1, 2).T
    cached = np.floor(prompts * min(1.0, max(0.0, hit_rate))).astype(np.int64)
    return Lengths(prompt_tokens=prompts, output_tokens=outputs, found_tokens=cached)
