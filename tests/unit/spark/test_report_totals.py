"""Totals over the reports of all engines and tasks: each counts once, however its reports come."""

import tracemalloc
from collections import Counter
from dataclasses import replace
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from pipemax.wire import JobStats, ServerStats
from pipemax_spark.executor.task_reports import TASK_ENDED_STATE, TASK_STATE
from pipemax_spark.report.report_totals import SILENT_S, ReportTotals
from tests.fakes.server_reports import server_report


def report(sender: str, at_s: float, *, state: str = "ready", **job: object) -> ServerStats:
    of_job = JobStats(**job)  # type: ignore[arg-type]  # the fields of JobStats
    return server_report(sender, at_s=at_s, job=of_job, state=state)


def job_of(stats: ServerStats) -> JobStats:
    return stats.jobs.get("job", JobStats())


def reports_of_task(number: int, random: Random) -> list[ServerStats]:
    """What one task sends in its life: growing counts, and as a rule a last report."""
    total, sent = Counter[str](), []
    for second in range(random.randint(1, 4)):
        total[random.choice(["response_format", "engine_error"])] += random.randint(1, 5)
        stats = report(f"task:{number}", float(second), state=TASK_STATE, errors=dict(total))
        sent.append(
            replace(stats, jobs={"job": replace(job_of(stats), error_examples=dict.fromkeys(total, "x"))})
        )
    if random.random() < 0.8:
        sent.append(replace(sent[-1], state=TASK_ENDED_STATE, at_unix_s=9.0))
    return sent


@given(tasks=st.integers(0, 12), random=st.randoms(use_true_random=False))
def test_a_tasks_errors_count_once_whatever_the_order_of_its_reports(tasks: int, random: Random) -> None:
    lives = [reports_of_task(number, random) for number in range(tasks)]
    arrivals = [stats for life in lives for stats in life]
    arrivals += random.choices(arrivals, k=len(arrivals)) if arrivals else []  # some come again
    random.shuffle(arrivals)
    totals = ReportTotals(job_of)
    for stats in arrivals:
        totals.take(stats, now_s=random.uniform(0, 1000))
    expected: Counter[str] = Counter()
    for life in lives:
        expected.update(job_of(life[-1]).errors)
    assert totals.totals().errors == dict(expected)
    assert set(totals.totals().errors_with_examples.values()) == {(n, "x") for n in expected.values()}
    assert totals.num_servers(now_s=0.0) == 0, "tasks are no servers"


@given(
    steps=st.lists(
        st.tuples(st.integers(0, 4), st.integers(0, 20), st.integers(0, 20), st.integers(-3, 3)), max_size=60
    ),
    gaps=st.lists(
        st.sampled_from([0.0, 1.0, SILENT_S / 2, SILENT_S, 2 * SILENT_S]), min_size=61, max_size=61
    ),
)
def test_servers_totals_are_those_of_their_latest_reports(
    steps: list[tuple[int, int, int, int]], gaps: list[float]
) -> None:
    """The other side sums up everything again at each step, as the collector once did."""
    totals, latest = ReportTotals(job_of), dict[str, tuple[float, ServerStats]]()
    now_s = 0.0
    for (server, received, done, late), gap_s in zip(steps, gaps, strict=False):
        now_s += gap_s
        stats = report(
            f"server {server}",
            now_s + late,
            rows_received=received,
            rows_done=done,
            completion_tokens=3 * done,
        )
        is_latest = server not in {int(name[7:]) for name in latest} or (
            latest[stats.server_id][1].at_unix_s <= stats.at_unix_s
        )
        assert totals.take(stats, now_s=now_s) == is_latest
        if is_latest:
            latest[stats.server_id] = (now_s, stats)
        alive = {name for name, (at_s, _) in latest.items() if now_s - at_s < SILENT_S}
        jobs = {name: job_of(stats) for name, (_, stats) in latest.items()}
        assert [s.server_id for s in totals.servers(now_s=now_s)] == sorted(alive)
        assert totals.num_servers(now_s=now_s) == len(alive)
        assert totals.rows_taken(now_s=now_s) == sum(
            job.rows_received if name in alive else job.rows_done for name, job in jobs.items()
        )
        told = totals.totals()
        rows_done = sum(job.rows_done for job in jobs.values())
        assert (told.rows_done, told.completion_tokens) == (rows_done, 3 * rows_done)


def test_a_server_that_was_silent_for_a_while_is_not_counted_twice() -> None:
    totals = ReportTotals(job_of)
    totals.take(report("a", 1.0, rows_received=50, rows_done=10), now_s=0.0)
    assert totals.rows_taken(now_s=SILENT_S) == 10, "the rest of its rows is sent to others"
    assert totals.servers(now_s=SILENT_S) == []
    totals.take(report("a", 90.0, rows_received=60, rows_done=30), now_s=90.0)
    assert totals.rows_taken(now_s=90.0) == 60
    assert (totals.totals().rows_done, totals.num_servers_with_rows()) == (30, 1)


def test_a_tasks_last_report_counts_though_its_clock_was_set_back() -> None:
    totals = ReportTotals(job_of)
    totals.take(report("task:a", 5.0, state=TASK_STATE, errors={"engine_error": 1}), now_s=0.0)
    assert totals.take(report("task:a", 2.0, state=TASK_ENDED_STATE, errors={"engine_error": 3}), now_s=0.0)
    assert totals.totals().errors == {"engine_error": 3}


def test_tasks_that_have_ended_leave_no_more_than_their_digests() -> None:
    totals, tasks = ReportTotals(job_of), 20_000
    messages = {"response_format": "x" * 300}

    def run_task(number: int) -> None:
        for state, rows in ((TASK_STATE, 1), (TASK_ENDED_STATE, 2)):
            errors = {"response_format": rows}
            sender = f"task:{number:032x}"
            totals.take(
                report(sender, float(rows), state=state, errors=errors, error_examples=messages), now_s=0.0
            )

    run_task(tasks)
    tracemalloc.start()
    for number in range(tasks):
        run_task(number)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert totals.totals().errors == {"response_format": 2 * (tasks + 1)}
    assert held / tasks < 200, "bytes"
