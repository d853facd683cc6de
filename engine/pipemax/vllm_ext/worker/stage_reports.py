"""Carry step and transfer times from the stages' workers to the controller.

Each worker reports a step with the next one; the scheduler waits until all workers have reported it. Reports lag by
the depth of the pipeline, which the controller expects.

Under tensor parallelism a stage has several workers, its ranks, each with copies of its own. All-reduces let them end
a step together, so a rank that had its copies early also waits for the last one: the time of the rank that computed
for the shortest is the stage's. A prefetch is done when the last rank has it.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pipemax.domain.events import Event, StepTimed, TransferTimed
from pipemax.domain.plan import StepId
from pipemax.transfer.commands import CopyCounts
from pipemax.vllm_ext.seam.vllm_types import KVConnectorWorkerMetadata


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """One step on one worker."""

    step_id: StepId
    compute_s: float
    """Does not include waits for the worker's own copies and for the stage before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefetchReport:
    """One step's prefetch on one worker."""

    step_id: StepId
    num_blocks: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StageReport:
    """One worker's times since its last report, and its counts."""

    rank: int = 0
    """Of the worker among those of its stage."""
    steps: tuple[StepReport, ...] = ()
    prefetches: tuple[PrefetchReport, ...] = ()
    stall_s: float = 0.0
    """Time spent waiting for copies."""
    copies: CopyCounts = field(default_factory=CopyCounts)
    """Counts since the start, not since the last report."""


@dataclass
class WorkerReports(KVConnectorWorkerMetadata):
    """Reports by stage; vLLM merges those of all workers into one."""

    by_stage: dict[int, list[StageReport]]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "WorkerReports":
        assert isinstance(other, WorkerReports)
        for stage, reports in other.by_stage.items():
            self.by_stage.setdefault(stage, []).extend(reports)
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        # As plain values: pickle takes longer for a frozen dataclass than for all that a worker reports of a step.
        return _from_values, (
            {stage: [_values(report) for report in reports] for stage, reports in self.by_stage.items()},
        )


def _values(report: StageReport) -> tuple[Any, ...]:
    return (
        report.rank,
        [(step.step_id, step.compute_s) for step in report.steps],
        [(prefetch.step_id, prefetch.num_blocks, prefetch.seconds) for prefetch in report.prefetches],
        report.stall_s,
        (report.copies.loaded_bytes, report.copies.stored_bytes),
    )


def _from_values(by_stage: dict[int, list[tuple[Any, ...]]]) -> WorkerReports:
    return WorkerReports(
        {stage: [_report(*values) for values in reports] for stage, reports in by_stage.items()}
    )


def _report(
    rank: int,
    steps: list[tuple[StepId, float]],
    prefetches: list[tuple[StepId, int, float]],
    stall_s: float,
    copies: tuple[int, int],
) -> StageReport:
    return StageReport(
        rank=rank,
        steps=tuple([StepReport(step_id=step_id, compute_s=compute_s) for step_id, compute_s in steps]),
        prefetches=tuple(
            [
                PrefetchReport(step_id=step_id, num_blocks=num_blocks, seconds=seconds)
                for step_id, num_blocks, seconds in prefetches
            ]
        ),
        stall_s=stall_s,
        copies=CopyCounts(loaded_bytes=copies[0], stored_bytes=copies[1]),
    )


class ReportBook:
    """Joins the workers' reports; a step is passed on once all ranks of all stages have reported it."""

    def __init__(self, num_stages: int, ranks_per_stage: int = 1) -> None:
        self.ranks_per_stage = ranks_per_stage
        self._workers = [[_Worker() for _ in range(ranks_per_stage)] for _ in range(num_stages)]

    @property
    def stall_s(self) -> list[float]:
        """Time spent waiting for copies since the start, by stage: of the rank that waited longest."""
        return [max(worker.stall_s for worker in stage) for stage in self._workers]

    @property
    def copies(self) -> list[CopyCounts]:
        """Counts by stage, of all its ranks, as last reported."""
        return [sum((worker.copies for worker in stage), CopyCounts()) for stage in self._workers]

    def take_in(self, reports: Mapping[int, Sequence[StageReport]]) -> list[Event]:
        for stage, stage_reports in reports.items():
            for report in stage_reports:
                worker = self._workers[stage][report.rank]
                worker.steps.extend(report.steps)
                worker.prefetches.extend(report.prefetches)
                worker.stall_s += report.stall_s
                worker.copies = report.copies
        return [*self._complete_steps(), *self._complete_prefetches()]

    def _complete_steps(self) -> list[Event]:
        events: list[Event] = []
        while all(worker.steps for stage in self._workers for worker in stage):
            row = [[worker.steps.popleft() for worker in stage] for stage in self._workers]
            assert len({report.step_id for stage in row for report in stage}) == 1, f"workers differ: {row}"
            stage_s = tuple(min(report.compute_s for report in stage) for stage in row)
            events.append(StepTimed(step_id=row[0][0].step_id, stage_s=stage_s))
        return events

    def _complete_prefetches(self) -> list[Event]:
        events: list[Event] = []
        while all(worker.prefetches for stage in self._workers for worker in stage):
            row = [[worker.prefetches.popleft() for worker in stage] for stage in self._workers]
            assert len({report.step_id for stage in row for report in stage}) == 1, f"workers differ: {row}"
            stage_s = tuple(max(report.seconds for report in stage) for stage in row)
            first = row[0][0]
            events.append(TransferTimed(step_id=first.step_id, num_blocks=first.num_blocks, stage_s=stage_s))
        return events


@dataclass(slots=True)
class _Worker:
    """What one worker has reported."""

    steps: deque[StepReport] = field(default_factory=deque)
    prefetches: deque[PrefetchReport] = field(default_factory=deque)
    stall_s: float = 0.0
    copies: CopyCounts = field(default_factory=CopyCounts)
