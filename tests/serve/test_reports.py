"""Reports to the collector: the right token, exact totals by the time a task ends, and no harm without it."""

import time
from collections.abc import Callable

from pipemax.wire import ErrorCode, JobOutlook
from tests.fakes.collector import FakeCollector
from tests.serve.support import files_of, options, run_prompts
from tests.waiting import wait_until

EnginePython = Callable[..., str]


def test_totals_are_exact_when_the_last_session_of_a_job_has_ended(shared_engine_python: str) -> None:
    engine_python = shared_engine_python
    submitted = []
    with FakeCollector() as collector:
        for round_ in (1, 2):
            opts = options(engine_python, collector=collector.address("s3cret"), job_id="a")
            run_prompts(["one two", "three", "", "[[error]]"], opts)
            totals = collector.reports[-1].jobs["a"]
            assert (totals.rows_received, totals.rows_done) == (4 * round_, 4 * round_)
            assert (totals.prompt_tokens, totals.completion_tokens) == (3 * round_, 7 * round_)
            assert totals.errors == {ErrorCode.EMPTY_PROMPT: round_, ErrorCode.ENGINE_ERROR: round_}
            assert totals.error_examples[ErrorCode.EMPTY_PROMPT] == "the prompt is empty"
            submitted.append(collector.reports[-1].engine_metrics["submitted"])
        assert collector.authorizations == {"Bearer s3cret"}
        # So are the engine's own figures, with the account of its time.
        assert submitted[1] - submitted[0] == 4
        assert collector.reports[-1].state == "ready"


def test_reports_come_every_period_with_what_the_engine_does(shared_engine_python: str) -> None:
    with FakeCollector() as collector:
        opts = options(shared_engine_python, collector=collector.address("t"), load_s=0.5)
        run_prompts(["[[slow 1.0]]"], opts)
        reports = collector.reports
    assert len(reports) >= 3
    assert {"loading", "ready"} <= {report.state for report in reports}
    assert any(report.detail.startswith("loading model fake") for report in reports)
    assert any(report.running_requests == 1 and report.phase == "decode" for report in reports)
    assert [r.at_unix_s for r in reports] == sorted(r.at_unix_s for r in reports)


def test_a_server_reports_no_earlier_than_the_collector_asks_and_a_jobs_end_at_once(
    shared_engine_python: str,
) -> None:
    with FakeCollector() as collector:
        collector.outlook = JobOutlook(job_id="asked", rows_left=0, engines=200, report_after_s=600.0)
        opts = options(shared_engine_python, collector=collector.address("t"), job_id="asked")
        run_prompts(["[[slow 1.0]]"], opts)
        assert len(collector.reports) <= 2
        assert collector.reports[-1].jobs["asked"].rows_done == 1


def test_a_collector_sees_only_its_own_jobs(shared_engine_python: str) -> None:
    engine_python = shared_engine_python
    with FakeCollector() as first, FakeCollector() as second:
        run_prompts(["a"], options(engine_python, collector=first.address("1"), job_id="one"))
        run_prompts(["a"], options(engine_python, collector=second.address("2"), job_id="two"))
        assert {job for report in first.reports for job in report.jobs} == {"one"}
        assert {job for report in second.reports for job in report.jobs} == {"two"}


def test_a_collector_that_was_too_busy_for_a_report_still_gets_the_totals(
    fake_engine_python: EnginePython,
) -> None:
    engine_python = fake_engine_python("--stats-push-s=0.1", "--stats-timeout-s=1")
    with FakeCollector() as collector:
        opts = options(engine_python, collector=collector.address("t"), job_id="a")
        collector.stalls_s = [1.8]
        run_prompts(["[[slow 1.5]] b", "c"], opts)
        assert collector.stalls_s == []
        assert collector.reports[-1].jobs["a"].rows_done == 2


def test_a_collector_that_goes_away_costs_one_warning(fake_engine_python: EnginePython) -> None:
    engine_python = fake_engine_python("--stats-push-s=0.1")
    with FakeCollector() as collector:
        opts = options(engine_python, collector=collector.address("t"))
        run_prompts(["a"], opts)
        assert collector.reports
    for _ in range(2):
        rows = run_prompts(["[[slow 0.3]] b", "c"], opts)
        assert [row["error_code"] for row in rows] == [None, None]
        time.sleep(0.3)  # meanwhile no session asks for reports
    log = files_of(opts).log
    wait_until(lambda: "cannot be reached" in log.read_text())
    assert log.read_text().count("cannot be reached") == 1
