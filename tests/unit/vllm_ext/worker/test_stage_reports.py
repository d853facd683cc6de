"""A step's time is told once all stages have reported it, in order."""

import pickle

from pipemax.domain.events import StepTimed, TransferTimed
from pipemax.domain.plan import StepId
from pipemax.transfer.commands import CopyCounts
from pipemax.vllm_ext.worker.stage_reports import (
    PrefetchReport,
    ReportBook,
    StageReport,
    StepReport,
    WorkerReports,
)
from tests.unit.vllm_ext.fake_worker import FakeCore, make_request, make_scheduler


def step(number: int, seconds: float, *, rank: int = 0) -> StageReport:
    return StageReport(rank=rank, steps=(StepReport(step_id=StepId(number), compute_s=seconds),))


def prefetch(number: int, num_blocks: int, seconds: float) -> PrefetchReport:
    return PrefetchReport(step_id=StepId(number), num_blocks=num_blocks, seconds=seconds)


def test_stages_that_report_at_different_times_are_joined() -> None:
    book = ReportBook(2)
    assert book.take_in({0: [step(1, 0.1), step(2, 0.2)]}) == []
    assert book.take_in({1: [step(1, 0.3)]}) == [StepTimed(step_id=StepId(1), stage_s=(0.1, 0.3))]
    assert book.take_in({1: [step(2, 0.4)]}) == [StepTimed(step_id=StepId(2), stage_s=(0.2, 0.4))]


def test_a_step_is_told_once_all_ranks_have_reported_it_with_the_time_of_the_one_that_waited_for_none() -> (
    None
):
    book = ReportBook(2, ranks_per_stage=2)
    assert book.take_in({0: [step(1, 0.1), step(1, 0.15, rank=1)], 1: [step(1, 0.3, rank=1)]}) == []
    assert book.take_in({1: [step(1, 0.2)]}) == [StepTimed(step_id=StepId(1), stage_s=(0.1, 0.2))]


def test_a_prefetch_takes_as_long_as_on_the_slowest_rank_of_each_stage() -> None:
    book = ReportBook(2, ranks_per_stage=2)
    seconds = {(0, 0): 0.1, (0, 1): 0.4, (1, 0): 0.3, (1, 1): 0.2}
    told = [
        book.take_in({stage: [StageReport(rank=rank, prefetches=(prefetch(3, 7, taken),))]})
        for (stage, rank), taken in seconds.items()
    ]
    assert told[:-1] == [[], [], []]
    assert told[-1] == [TransferTimed(step_id=StepId(3), num_blocks=7, stage_s=(0.4, 0.3))]


def test_a_stage_waits_as_long_as_its_slowest_rank_and_copies_what_all_of_them_do() -> None:
    book = ReportBook(2, ranks_per_stage=2)
    counts = CopyCounts(loaded_bytes=5, stored_bytes=3)
    for rank in (0, 1):
        book.take_in({1: [StageReport(rank=rank, stall_s=0.25 + rank, copies=counts)]})
    assert book.stall_s == [0.0, 1.25]
    assert book.copies == [CopyCounts(), CopyCounts(loaded_bytes=10, stored_bytes=6)]


def test_prefetches_and_stalls_are_reported_beside_steps() -> None:
    book = ReportBook(1)
    assert book.take_in({0: [StageReport(prefetches=(prefetch(3, 7, 0.5),), stall_s=0.25)]}) == [
        TransferTimed(step_id=StepId(3), num_blocks=7, stage_s=(0.5,))
    ]
    assert book.stall_s == [0.25]


def test_copies_are_counted_by_the_stages_and_the_last_word_holds() -> None:
    book = ReportBook(2)
    first, second = CopyCounts(loaded_bytes=5), CopyCounts(loaded_bytes=9)
    book.take_in({1: [StageReport(copies=first), StageReport(copies=second)]})
    assert book.copies == [CopyCounts(), second]


def test_what_the_stages_counted_stands_among_the_engines_figures() -> None:
    core = FakeCore(make_scheduler(gpu_blocks=64, host_blocks=100, num_batches=2, stages=2))
    core.add(make_request("a", [5, 6, 7], max_tokens=4))
    core.run()
    counts = [CopyCounts(loaded_bytes=5, stored_bytes=1), CopyCounts(loaded_bytes=6, stored_bytes=2)]
    reports = {stage: [StageReport(copies=of_stage, stall_s=0.5)] for stage, of_stage in enumerate(counts)}
    core.scheduler._reports.take_in(reports)
    stats = core.scheduler.make_stats()
    assert stats is not None
    figures = stats.kv_connector_stats
    assert figures is not None
    assert (figures["loaded_bytes"], figures["stored_bytes"]) == (11, 3)
    assert figures["prefetch_stall_s"] == 0.5


def test_vllm_merges_the_workers_reports() -> None:
    merged = WorkerReports({0: [step(1, 0.1)]}).aggregate(WorkerReports({1: [step(1, 0.2)]}))
    assert merged.by_stage == {0: [step(1, 0.1)], 1: [step(1, 0.2)]}


def test_reports_arrive_as_they_were_sent() -> None:
    report = StageReport(
        rank=1,
        steps=(StepReport(step_id=StepId(1), compute_s=0.1), StepReport(step_id=StepId(2), compute_s=0.2)),
        prefetches=(prefetch(1, 12, 0.3),),
        stall_s=0.4,
        copies=CopyCounts(loaded_bytes=5, stored_bytes=6),
    )
    reports = WorkerReports({0: [report, step(2, 0.2)], 3: [StageReport()]})
    assert pickle.loads(pickle.dumps(reports)) == reports
