"""What the driver makes of the engines' reports: the account of time, the Parquet file, the picture, what is left."""

from collections import Counter
from dataclasses import replace
from io import StringIO
from math import inf, nan
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pyarrow.parquet as pq
import pytest
from rich.console import Console

from pipemax.wire import JobOutlook, JobStats, ServerStats
from pipemax_spark.executor.task_reports import TASK_ENDED_STATE, TASK_STATE, TaskReporter
from pipemax_spark.report.charts import charts_of, picture_of
from pipemax_spark.report.collector import Collector, UnheardCollector
from pipemax_spark.report.engine_log import EngineLog, ReportThinner
from pipemax_spark.report.engine_tracks import EngineTracks
from pipemax_spark.report.policy_notes import PolicyNotes, wants_row_lengths
from pipemax_spark.report.progress import Progress, ProgressLine
from pipemax_spark.report.report_totals import SILENT_S
from pipemax_spark.report.summary import Summary, earlier_length_correlation
from pipemax_spark.report.terminal import Terminal
from pipemax_spark.report.time_accounts import NO_ENGINE, TimeAccounts, describe_account, whole_account
from pipemax_spark.report.tracking import Tracker
from pipemax_spark.request.error_limits import ErrorLimits
from tests.fakes.collector import FakeCollector
from tests.fakes.server_reports import outlook_after, server_report


def report(
    server: str = "a", *, starts: int = 1, at_s: float = 0.0, job: JobStats | None = None, **times: float
) -> ServerStats:
    metrics = {f"time_{part}_s": seconds for part, seconds in times.items()}
    return server_report(
        server, at_s=at_s, job=job or JobStats(), engine_starts=starts, engine_metrics=metrics
    )


def test_time_before_the_job_is_not_counted_as_the_job_s() -> None:
    accounts = TimeAccounts()
    accounts.add(report("old", start_up=30.0, decode=100.0), job_age_s=2.0)
    accounts.add(report("old", start_up=30.0, decode=107.0), job_age_s=9.0)
    accounts.add(report("new", start_up=5.0), job_age_s=9.0)
    accounts.add(report("new", start_up=5.0, prefill=3.0), job_age_s=12.0)
    accounts.add(report("new", starts=2, start_up=4.0), job_age_s=20.0)
    assert accounts.total() == {"start_up": 9.0, "decode": 7.0, "prefill": 3.0}


def test_the_whole_account_sums_to_the_time_of_all_engines_and_reads_in_one_line() -> None:
    account = whole_account({"start_up": 40.0, "decode": 50.0, "drain": 0.1}, engines=2, seconds=60.0)
    assert sum(account.values()) == pytest.approx(120.0)
    assert account[NO_ENGINE] == pytest.approx(29.9)
    assert describe_account(account) == "start-up 33%, decode 42%, no engine 25% of 120.0 s"
    assert whole_account({}, engines=1, seconds=60.0) == {}


def test_every_report_is_a_row_of_the_parquet_file(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "engine_metrics.parquet"
    with EngineLog(path) as log:
        for i in range(700):  # more than are written at once
            stats = report(at_s=1_700_000_000.0 + i, decode=float(i))
            log.add(stats, JobStats(rows_done=i))
    log.add(stats, JobStats())  # a late one
    table = pq.read_table(path)
    assert table.num_rows == 700
    last: dict[str, Any] = table.slice(699).to_pylist()[0]
    assert (last["rows_done"], dict(last["metrics"])) == (699, {"time_decode_s": 699.0})
    assert last["at"].timestamp() == 1_700_000_699.0


@pytest.mark.parametrize("is_full", [False, True])
def test_a_file_of_reports_that_cannot_be_written_ends_no_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, is_full: bool
) -> None:
    path = tmp_path / "engine_metrics.parquet"
    path.symlink_to("/dev/full" if is_full else "/proc/none/file")
    with EngineLog(path) as log:
        for i in range(700):
            log.add(report(at_s=float(i), decode=float(i)), JobStats(rows_done=i))
    assert caplog.text.count("cannot be written any more") == 1


def test_servers_are_told_what_is_left_for_them_once_the_jobs_size_is_known() -> None:
    collector = Collector(host="127.0.0.1", bind_hosts=["127.0.0.1"], job_id="job")
    with collector:
        outlook_after(collector, report("a", job=JobStats(rows_received=300)))
        assert collector.outlook() is None
        collector.expect(900)
        collector.expect(100)
        outlook = outlook_after(collector, report("b", at_s=1.0, job=JobStats(rows_received=200)))
    assert (outlook.job_id, outlook.rows_left, outlook.engines) == ("job", 500, 2)


@pytest.mark.parametrize(
    ("learned", "earlier", "expected"),
    [
        ([], 0.6, 0.6),
        ([("vllm", None)], 0.6, 0.6),
        ([("vllm", None), ("pipemax", None)], 0.6, None),
        ([("vllm", 0.5), ("vllm", 0.3), ("pipemax", -0.9)], 0.9, 0.4),
        ([("vllm", 0.5), ("vllm", None)], None, 0.5),
    ],
)
def test_engines_under_stock_vllm_or_else_an_earlier_run_say_whether_prompts_tell_how_long_answers_are(
    learned: list[tuple[str, float | None]], earlier: float | None, expected: float | None
) -> None:
    with Collector(host="127.0.0.1", bind_hosts=["127.0.0.1"], job_id="job") as collector:
        for number, (chosen, correlation) in enumerate(learned):
            jobs = {
                "other": JobStats(length_correlation=0.99),
                "job": JobStats(length_correlation=correlation),
            }
            outlook_after(collector, replace(report(f"{number}"), policy={"chosen": chosen}, jobs=jobs))
        assert collector.length_correlation(earlier=earlier) == pytest.approx(expected)


def test_an_earlier_run_is_the_latest_on_the_output_that_has_learned_it(tmp_path: Path) -> None:
    def write(run_id: str, **values: Any) -> None:
        (tmp_path / run_id).mkdir()
        summary = Summary(rows_in=1, output="table", length_correlation=0.1)
        (tmp_path / run_id / "summary.json").write_text(replace(summary, **values).to_json())

    assert earlier_length_correlation(tmp_path / "none", "table") is None
    write("20261101T000000-a")
    write("20261102T000000-b", length_correlation=0.2)
    write("20261103T000000-c", length_correlation=None)
    write("20261104T000000-d", output="another", length_correlation=0.4)
    (tmp_path / "20261105T000000-e").mkdir()
    (tmp_path / "20261105T000000-e" / "summary.json").write_text('{"length_corr')
    assert earlier_length_correlation(tmp_path, "table") == 0.2
    assert earlier_length_correlation(tmp_path, "another") == 0.4


def test_many_servers_and_many_tasks_are_asked_for_fewer_reports() -> None:
    with Collector(host="127.0.0.1", bind_hosts=["127.0.0.1"], job_id="job") as collector:
        collector.expect(10**9)
        assert _report_after_s(collector, [report("0")]) < 1.0, "one engine reports each second"
        assert _report_after_s(collector, [report(f"{i}") for i in range(200)]) == 200 / 25
        assert _report_after_s(collector, [report(f"{i}") for i in range(5_000)]) < SILENT_S / 2
        running = [server_report(f"task:{i}", job=JobStats(), state=TASK_STATE) for i in range(500)]
        assert _report_after_s(collector, running) == 500 / 25
        ended = [replace(stats, state=TASK_ENDED_STATE) for stats in running]
        assert _report_after_s(collector, ended) == 0.0


def _report_after_s(collector: Collector, reports: list[ServerStats]) -> float:
    """Return what the sender of the last of these reports is asked for."""
    outlooks = [outlook_after(collector, stats) for stats in reports]
    assert outlooks[-1] is not None
    return outlooks[-1].report_after_s


def test_where_nobody_can_report_what_is_committed_is_the_progress() -> None:
    with UnheardCollector(job_id="job") as collector:
        line = ProgressLine(show=lambda text: None, period_s=1.0)
        progress = Progress(collector, line, limits=ErrorLimits(max_rate=0.5), stop_job=lambda reason: None)
        progress.expect(60)
        assert "starting tasks and engines" in progress.line(progress.take_sample())
        collector.committed(40)
        assert "40 of 60 rows" in progress.line(progress.take_sample())
    assert (collector.address, collector.engines(), collector.silent_s()) == (None, 0, inf)


def test_the_roomiest_engine_says_how_many_rows_keep_engines_fed() -> None:
    collector = Collector(host="127.0.0.1", bind_hosts=["127.0.0.1"], job_id="job")
    with collector:
        outlook_after(collector, report("loads"))
        assert collector.engine_rows() is None
        outlook_after(collector, replace(report("a"), window_rows=300))
        outlook_after(collector, replace(report("b"), window_rows=200))
    assert collector.engine_rows() == 300


def test_a_task_tells_its_errors_while_it_runs_and_that_it_has_ended() -> None:
    with FakeCollector() as collector:
        with TaskReporter(collector.address("t"), "job") as reporter:
            reporter.count(Counter({("response_format", "not JSON"): 2}))
            reporter.count(Counter({("response_format", "no brace"): 1}))
        with TaskReporter(collector.address("t"), "job") as reporter:
            reporter.count(Counter())
        told = [(stats.state, stats.jobs["job"].errors) for stats in collector.reports]
    assert told == [(TASK_STATE, {"response_format": 2}), (TASK_ENDED_STATE, {"response_format": 3})]


def test_a_task_reports_no_earlier_than_the_driver_asks_and_its_end_at_once() -> None:
    with FakeCollector() as collector:
        collector.outlook = JobOutlook(job_id="job", rows_left=1, engines=1, report_after_s=600.0)
        with TaskReporter(collector.address("t"), "job", period_s=0.0) as reporter:
            for _ in range(3):
                reporter.count(Counter({("response_format", "not JSON"): 2}))
        told = [(stats.state, stats.jobs["job"].errors) for stats in collector.reports]
    assert told == [(TASK_STATE, {"response_format": 2}), (TASK_ENDED_STATE, {"response_format": 6})]


def test_the_driver_counts_the_errors_of_all_tasks_and_no_task_as_an_engine() -> None:
    with Collector(host="127.0.0.1", bind_hosts=["127.0.0.1"], job_id="job") as collector:
        collector.expect(100)
        for _ in range(3):
            with TaskReporter(collector.address, "job") as reporter:
                reporter.count(Counter({("response_format", "not JSON"): 2}))
                assert collector.totals().rows_error % 2 == 0
        totals, outlook = collector.totals(), collector.outlook()
    assert totals.errors_with_examples == {"response_format": (6, "not JSON")}
    assert (outlook.rows_left, outlook.engines, collector.engines()) == (100, 0, 0)


@pytest.mark.parametrize("engines", [0, 1, 6])
@pytest.mark.parametrize(
    "metrics",
    [
        {},
        {"measured_step_s": 0.02},
        {"measured_step_s": 0.02, "predicted_step_s": 0.03, "host_kv_usage": 0.5, "is_calibrated": 1.0},
        {"measured_step_s": inf, "predicted_step_s": nan, "host_kv_usage": inf, "is_calibrated": 1.0},
        {"measured_step_s": 1e-30, "predicted_step_s": 1e30, "host_kv_usage": -1.0, "is_calibrated": 1.0},
        {"measured_step_s": 0.0, "predicted_step_s": -1.0, "is_calibrated": 1.0},
    ],
)
def test_a_picture_is_drawn_whatever_the_engines_tell(engines: int, metrics: dict[str, float]) -> None:
    phases = ["loading", "prefill", "decode", "odd"]
    tracks = EngineTracks()
    for second in range(20):
        for number in range(engines):
            stats = replace(report(f"server {number}"), phase=phases[second // 5], engine_metrics=metrics)
            tracks.add(stats, JobStats(rows_done=second), reported_s=second - 0.5)
    for svg in (picture_of(tracks.by_server), *charts_of(tracks.by_server).values()):
        drawn = ElementTree.fromstring(svg)
        assert "nan" not in svg
        assert drawn.find(".//{*}path") is not None


def test_the_file_of_all_reports_grows_slower_and_slower() -> None:
    full, seconds = 4_000, 8_000
    thinner = ReportThinner(rows_at_full_rate=full)
    written = [
        second
        for second in range(seconds)
        for server in "ab"
        if thinner.choose(report(server, at_s=1_700_000_000.0 + second))
    ]
    assert written[:full] == [row // 2 for row in range(full)]
    tail = written[-20:]
    assert tail[-1] - tail[0] == pytest.approx(9 * seconds * 2 / full, abs=10)
    failed = replace(report("a", at_s=1_700_000_000.0 + seconds), state="failed")
    assert thinner.choose(failed), "a new state is written at once"


def test_engines_that_are_gone_do_not_thin_their_successors_reports() -> None:
    thinner, lives, life_s = ReportThinner(rows_at_full_rate=2_000), 10, 200
    written = [
        life
        for life in range(lives)
        for second in range(life_s)
        if thinner.choose(report(f"life {life}", at_s=1_700_000_000.0 + 2 * life * life_s + second))
    ]
    # At 4,000 s, one engine at a time, reports are two seconds apart.
    assert written.count(lives - 1) == pytest.approx(life_s / 2, rel=0.1)


def test_policy_and_layout_are_told_of_the_job_s_own_engine_and_not_of_the_one_before(tmp_path: Path) -> None:
    printed = StringIO()
    terminal = Terminal(Console(file=printed, width=200))
    tracker = Tracker("", local_store=tmp_path, warn=terminal.warn)
    seen = [(1, 0, "of another job"), (2, 0, "ours"), (2, 3, "ours"), (2, 9, "ours")]
    with Collector(host="127.0.0.1", bind_hosts=["127.0.0.1"], job_id="job") as collector:
        notes = PolicyNotes(collector, terminal, tracker)
        for starts, rows_done, reason in seen:
            stats = report(starts=starts, at_s=float(rows_done), job=JobStats(rows_done=rows_done))
            policy = {"chosen": "vllm", "reason": reason, "layout": f"{reason}, too"}
            outlook_after(collector, replace(stats, policy=policy))
            notes.look()
    assert printed.getvalue().split() == ["Policy", "vllm:", "ours", "Layout", "ours,", "too"]
    assert [choice["reason"] for choice in notes.choices] == ["ours"]


def test_a_tuning_that_goes_on_is_one_line_of_the_report(tmp_path: Path) -> None:
    terminal = Terminal(Console(file=StringIO(), width=200))
    tracker = Tracker("", local_store=tmp_path, warn=terminal.warn)
    lines = ["Tuned: steps of 8,192", "Tuned: steps of 8,192; n-gram speculation: +20 %, taken"]
    with Collector(host="127.0.0.1", bind_hosts=["127.0.0.1"], job_id="job") as collector:
        notes = PolicyNotes(collector, terminal, tracker)
        for second, line in enumerate(lines):
            stats = report(at_s=float(second), job=JobStats(rows_done=1))
            outlook_after(collector, replace(stats, tuning=line))
            notes.look()
    assert notes.tunings == lines[1:]


@pytest.mark.parametrize(
    ("engine", "wanted"),
    [
        ({}, True),
        ({"policy": "vllm"}, True),
        ({"policy": "vllm", "pipeline_parallel_size": 2}, False),
        ({"policy": "auto", "pipeline_parallel_size": 2}, True),
        ({"row_lengths": {"prompt_tokens": [1], "max_tokens": 1}}, False),
    ],
)
def test_rows_are_sampled_where_simulations_choose(engine: dict[str, object], wanted: bool) -> None:
    assert wants_row_lengths(engine) is wanted
