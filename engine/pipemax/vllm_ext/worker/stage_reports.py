"""Carry step and transfer times from the stages' workers to the controller.

Each stage reports a step with the next one; the scheduler waits until all stages have reported it. Reports lag by
the depth of the pipeline, which the controller expects.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata

from pipemax.domain.events import Event, StepTimed, TransferTimed
from pipemax.domain.plan import StepId
from pipemax.transfer.commands import CopyCounts


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """One step on one stage."""

    step_id: StepId
    compute_s: float
    """Does not include waits for copies and for the stage before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefetchReport:
    """One step's prefetch on one stage."""

    step_id: StepId
    num_blocks: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StageReport:
    """One stage's times since its last report, and its counts."""

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


class ReportBook:
    """Joins the stages' reports; a step is passed on once all stages have reported it."""

    def __init__(self, num_stages: int) -> None:
        self._steps: list[deque[StepReport]] = [deque() for _ in range(num_stages)]
        self._prefetches: list[deque[PrefetchReport]] = [deque() for _ in range(num_stages)]
        self.stall_s = [0.0] * num_stages
        """Time spent waiting for copies since the start, by stage."""
        self.copies = [CopyCounts()] * num_stages
        """Counts by stage, as last reported."""

    def take_in(self, reports: Mapping[int, Sequence[StageReport]]) -> list[Event]:
        for stage, stage_reports in reports.items():
            for report in stage_reports:
                self._steps[stage].extend(report.steps)
                self._prefetches[stage].extend(report.prefetches)
                self.stall_s[stage] += report.stall_s
                self.copies[stage] = report.copies
        return [*self._complete_steps(), *self._complete_prefetches()]

    def _complete_steps(self) -> list[Event]:
        events: list[Event] = []
        while all(self._steps):
            row = [queue.popleft() for queue in self._steps]
            assert len({report.step_id for report in row}) == 1, f"stages report different steps: {row}"
            events.append(
                StepTimed(step_id=row[0].step_id, stage_s=tuple(report.compute_s for report in row))
            )
        return events

    def _complete_prefetches(self) -> list[Event]:
        events: list[Event] = []
        while all(self._prefetches):
            row = [queue.popleft() for queue in self._prefetches]
            assert len({report.step_id for report in row}) == 1, f"stages report different prefetches: {row}"
            events.append(
                TransferTimed(
                    step_id=row[0].step_id,
                    num_blocks=row[0].num_blocks,
                    stage_s=tuple(report.seconds for report in row),
                )
            )
        return events
