"""What the parent knows of one replica, through all of its lives. Plain bookkeeping; the caller holds the lock."""

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from pipemax.domain.step_records import MOST_STEPS, StepLimits, StepRecords, TuningFacts
from pipemax.engine import EngineStats
from pipemax.generation import GenerationRequest
from pipemax.replicas.division import Share
from pipemax.replicas.messages import InputOpen, Report, SetLimits, Started, Submit, TakeSteps, ToReplica
from pipemax.replicas.process import ReplicaProcess
from pipemax.replicas.summed_stats import carried_counts, with_carried


class ReplicaState(StrEnum):
    """Where a replica is in its life."""

    STARTING = "starting"  # its process loads the engine
    UP = "up"
    ENDING = "ending"  # it is dead, and its processes give back their memory
    RESTING = "resting"  # it waits for its next start
    GIVEN_UP = "given up"  # it died too often without a row that it completed


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartLimits:
    """How a replica that died is replaced."""

    first_rest_s: float = 1.0
    """Wait before a restart; twice as long after each death without a completion."""
    longest_rest_s: float = 60.0
    max_fruitless: int = 3
    """After so many deaths without a completion between them a replica is given up, and the others go on."""
    silence_s: float = 60.0
    """A replica that has said nothing for this long hangs, and is killed."""


@dataclass(slots=True)
class Replica:
    """One replica."""

    number: int
    """From 1."""
    share: Share
    process: ReplicaProcess | None = None
    state: ReplicaState = ReplicaState.RESTING
    starts: int = 0
    speculates: bool = False
    """Whether its present life runs with n-gram speculation."""
    is_replaced: bool = False
    """Its present life is being ended, to be followed by one with n-gram speculation or without."""
    fruitless: int = 0
    """Deaths since its last completion."""
    due_s: float = 0.0
    """When it starts again, if it rests."""
    began_s: float = 0.0
    """When its present life began."""
    start_s: float = 0.0
    """How long its latest start took."""
    heard_s: float = 0.0
    last_words: str = ""
    """Why it says that it ends."""
    has_machine_fault: bool = False
    """Whether it ends by a fault of the machine, such as of its GPU."""
    measures_nothing: bool = False
    """It has said that its start checks and measures nothing that others need."""
    policy: dict[str, Any] = field(default_factory=dict)
    most_limits: StepLimits | None = None
    """The limits of steps that it was started for; None if they are fixed, or it was never up."""
    limits: StepLimits | None = None
    """Those that it was sent, at first those with which it began."""
    tuning: TuningFacts | None = None
    rows_done: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    _records: StepRecords = field(default_factory=StepRecords.none)
    _report: Report | None = None
    _carried: dict[str, float] = field(default_factory=dict)
    _submits: int = 0
    _unheard: deque[tuple[int, float]] = field(default_factory=deque)
    """(number, tokens) of each ``Submit`` that no report has counted yet."""

    @property
    def is_up(self) -> bool:
        return self.state is ReplicaState.UP

    def begin_life(self, process: ReplicaProcess, *, now_s: float, speculates: bool) -> None:
        """Note that its process starts."""
        self.process, self.state, self.last_words = process, ReplicaState.STARTING, ""
        self.began_s, self.speculates, self.is_replaced = now_s, speculates, False
        self.starts += 1
        self._submits = 0

    def note_started(self, started: Started, *, input_open: bool) -> None:
        """Note that it can take rows, and tell it what the others were told before."""
        self.state, self.policy, self.most_limits = ReplicaState.UP, started.policy, started.most_limits
        self.start_s = self.heard_s - self.began_s
        if not self.speculates:  # with it, an engine is another one to those who remember
            self.tuning = started.tuning
        self.send(InputOpen(is_open=input_open))
        if self.limits is None:
            self.limits = started.limits
        else:
            self.set_limits(self.limits)

    def set_limits(self, limits: StepLimits) -> None:
        """Have it schedule by these limits, as soon as it is up; none above those of its latest start."""
        self.limits = limits
        if self.is_up and self.most_limits is not None:
            self.send(SetLimits(limits=limits.within(self.most_limits)))

    def note_steps(self, records: StepRecords) -> None:
        self._records = StepRecords.joined([self._records, records], newest=MOST_STEPS)

    def take_step_records(self) -> StepRecords:
        """Return the steps that it has sent since the last call, and ask for more."""
        if self.is_up:
            self.send(TakeSteps())
        records, self._records = self._records, StepRecords.none()
        return records

    def end_life(self) -> None:
        """Note that it has died; its counts stay."""
        if self._report is not None:
            self._carried = carried_counts(self._carried, self._report.stats.metrics)
        self._report = None
        self._unheard.clear()
        self.state = ReplicaState.ENDING

    def kill(self) -> None:
        """Kill all processes of its present life."""
        assert self.process is not None, self
        self.process.kill()

    def send(self, message: ToReplica) -> None:
        assert self.process is not None, self
        self.process.send(message)

    def submit(self, requests: Sequence[GenerationRequest], *, expected_tokens: float) -> None:
        """Send rows, which are expected to come to so many tokens."""
        self._submits += 1
        self._unheard.append((self._submits, expected_tokens))
        self.send(Submit(number=self._submits, requests=tuple(requests)))

    def note_report(self, report: Report) -> None:
        self._report = report
        while self._unheard and self._unheard[0][0] <= report.heard:
            self._unheard.popleft()

    def credit_tokens(self) -> float:
        """Return the tokens that it can take beyond what it was sent; 0 unless it is up."""
        if not self.is_up or self._report is None:
            return 0.0
        return self._report.credit_tokens - sum(tokens for _, tokens in self._unheard)

    def stats(self) -> EngineStats | None:
        """Return its engine's statistics, with the counts of its earlier lives; None if it has said nothing."""
        if self._report is None:
            return EngineStats(metrics=dict(self._carried)) if self._carried else None
        stats = self._report.stats
        return replace(stats, metrics=with_carried(stats.metrics, self._carried))

    def figures(self, *, rows: int) -> dict[str, Any]:
        """Return what reports show of it, as plain values; it has so many ``rows``."""
        stats = self._report.stats if self._report is not None else EngineStats()
        in_all = self.stats() or stats
        return {
            "replica": self.number,
            "state": self.state.value,
            "restarts": max(0, self.starts - 1),
            "start_s": self.start_s,
            "speculates": self.speculates,
            "pid": None if self.process is None else self.process.pid,
            "gpus": list(self.share.gpus),
            "cores": len(self.share.cores),
            "policy": self.policy.get("chosen"),
            "phase": stats.phase,
            "rows": rows,
            "running_requests": stats.running_requests,
            "waiting_requests": stats.waiting_requests,
            "kv_usage": stats.kv_usage,
            "rows_done": self.rows_done,
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "output_tokens": in_all.metrics.get("output_tokens", 0.0),
        }


def next_to_change(replicas: Sequence[Replica], speculating: Collection[int]) -> Replica | None:
    """Return a replica that is to begin or to leave speculation, while all are up: they change one after the other."""
    if any(replica.is_replaced or not replica.is_up for replica in replicas):
        return None
    return next((one for one in replicas if one.speculates != (one.number in speculating)), None)
