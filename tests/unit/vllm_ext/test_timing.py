"""A step's time is told once all stages have reported it, in order."""

from pipemax.domain.events import StepTimed, TransferTimed
from pipemax.domain.plan import StepId
from pipemax.vllm_ext.timing import LoadReport, ReportBook, StageReport, StepReport, WorkerReports


def step(number: int, seconds: float) -> StageReport:
    return StageReport(steps=(StepReport(step_id=StepId(number), compute_s=seconds),))


def test_stages_that_report_at_different_times_are_joined() -> None:
    book = ReportBook(2)
    assert book.take_in({0: [step(1, 0.1), step(2, 0.2)]}) == []
    assert book.take_in({1: [step(1, 0.3)]}) == [StepTimed(step_id=StepId(1), stage_s=(0.1, 0.3))]
    assert book.take_in({1: [step(2, 0.4)]}) == [StepTimed(step_id=StepId(2), stage_s=(0.2, 0.4))]


def test_loads_and_stalls_are_reported_beside_steps() -> None:
    book = ReportBook(1)
    load = LoadReport(step_id=StepId(3), num_blocks=7, seconds=0.5)
    assert book.take_in({0: [StageReport(loads=(load,), stall_s=0.25)]}) == [
        TransferTimed(step_id=StepId(3), num_blocks=7, stage_s=(0.5,))
    ]
    assert book.stall_s == [0.25]


def test_vllm_merges_the_workers_reports() -> None:
    merged = WorkerReports({0: [step(1, 0.1)]}).aggregate(WorkerReports({1: [step(1, 0.2)]}))
    assert merged.by_stage == {0: [step(1, 0.1)], 1: [step(1, 0.2)]}
