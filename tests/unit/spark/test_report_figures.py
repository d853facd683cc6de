"""Each figure of a run's report, computed again from the events that it came from."""

import re
from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipemax.wire import JobStats, ServerStats
from pipemax_spark.report.engine_rates import EngineRates
from pipemax_spark.report.report_page import report_page
from pipemax_spark.report.report_totals import ReportTotals
from pipemax_spark.report.samples import Sample, in_rows
from pipemax_spark.report.summary import Findings, Summary, facts_of
from pipemax_spark.report.time_accounts import TimeAccounts, whole_account, working_seconds
from pipemax_spark.request.prices import Prices
from tests.fakes.server_reports import server_report
from tests.unit.spark.test_report_page import RUN

PARTS = ("waiting_for_input", "prefill", "decode", "drain")
seconds = st.integers(1, 50).map(float)


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """What an engine does for a while, and what of this job it has done by the end of it."""

    part: str
    seconds: float
    at_full_rate: float
    """How long a drain would have taken at the full rate, as a share."""
    rows: int
    errors: int
    is_reported: bool


events = st.builds(
    Event,
    part=st.sampled_from(PARTS),
    seconds=seconds,
    at_full_rate=st.floats(0, 1),
    rows=st.integers(0, 20),
    errors=st.integers(0, 3),
    is_reported=st.booleans(),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    starts_s: float
    """By the job's clock: negative for an engine that is older than the job."""
    start_up_s: float
    events: tuple[Event, ...]

    def reports(self, name: str) -> list[tuple[float, ServerStats]]:
        """Return the reports that reach the driver, each with the job's age."""
        at_s, times, full_rate_s, job = self.starts_s, Counter[str](), 0.0, JobStats()
        told = []
        steps = [
            ("start_up", self.start_up_s, None),
            *((each.part, each.seconds, each) for each in self.events),
        ]
        for step, (part, step_s, event) in enumerate(steps):
            at_s += step_s
            times[part] += step_s
            if event is not None:
                full_rate_s += step_s * event.at_full_rate * (part == "drain")
                if at_s > 0:
                    job = JobStats(
                        rows_received=job.rows_done + event.rows + event.errors,
                        rows_done=job.rows_done + event.rows + event.errors,
                        rows_reused=job.rows_reused + event.rows // 2,
                        errors={"engine_error": job.errors.get("engine_error", 0) + event.errors},
                        completion_tokens=job.completion_tokens + 7 * event.rows,
                    )
            is_last = step == len(steps) - 1
            if at_s > 0 and (is_last or (event is not None and event.is_reported)):
                metrics = {f"time_{name}_s": times[name] for name in ("start_up", *PARTS)}
                metrics["drain_at_full_rate_s"] = full_rate_s
                told.append(
                    (at_s, server_report(name, at_s=at_s, job=job, engine_starts=1, engine_metrics=metrics))
                )
        return told

    def of_job(self, first_report_s: float) -> tuple[Counter[str], float]:
        """Return the engine's seconds by part that are the job's, and its drain at the full rate."""
        is_older = self.starts_s + self.start_up_s <= 0
        since_s = first_report_s if is_older else 0.0
        at_s, times, full_rate_s = self.starts_s, Counter[str](), 0.0
        for part, step_s, share in [
            ("start_up", self.start_up_s, 0.0),
            *((each.part, each.seconds, each.at_full_rate) for each in self.events),
        ]:
            own_s = max(0.0, at_s + step_s - max(at_s, since_s))
            times[part] += own_s
            full_rate_s += own_s * share * (part == "drain")
            at_s += step_s
        return times, full_rate_s


engines = st.lists(
    st.builds(
        Engine,
        # The account takes an engine that is up to a second older for one that is as old as the job.
        starts_s=st.integers(-80, 20).filter(lambda s: not -2 < s < 0).map(float),
        start_up_s=seconds,
        events=st.lists(events, min_size=1, max_size=6).map(tuple),
    ).filter(lambda engine: engine.reports("x")),
    min_size=1,
    max_size=4,
)


def numbers(facts: dict[str, str], name: str) -> list[float]:
    return [float(text.replace(",", "")) for text in re.findall(r"\d[\d,]*(?:\.\d+)?", facts[name])]


@given(engines=engines, tail_s=st.floats(0, 10), price=st.floats(0.5, 100))
def test_the_figures_of_a_report_follow_from_the_engines_events(
    engines: list[Engine], tail_s: float, price: float
) -> None:
    accounts, rates = TimeAccounts(), EngineRates()
    totals = ReportTotals(lambda stats: stats.jobs.get("job", JobStats()))
    reports = {f"e{number}": engine.reports(f"e{number}") for number, engine in enumerate(engines)}
    for age_s, stats in sorted((each for own in reports.values() for each in own), key=lambda each: each[0]):
        assert totals.take(stats, now_s=age_s)
        accounts.add(stats, job_age_s=age_s)
        rates.add(stats, stats.jobs["job"])
    run_s = max(own[-1][0] for own in reports.values()) + tail_s

    expected, full_rate_s = Counter[str](), 0.0
    for name, engine in zip(reports, engines, strict=True):
        times, full_s = engine.of_job(reports[name][0][0])
        expected.update(times)
        full_rate_s += full_s
    expected["no_engine"] = len(engines) * run_s - sum(expected.values())
    last = [own[-1][1].jobs["job"] for own in reports.values()]
    rows = sum(job.rows_done for job in last)

    account = whole_account(accounts.total(), engines=accounts.num_servers(), seconds=run_s)
    assert {part: s for part, s in account.items() if s > 1e-6} == pytest.approx(
        {part: s for part, s in expected.items() if s > 1e-6}, abs=1e-6
    )
    drain_s = accounts.drain_at_full_rate_s()
    assert drain_s == pytest.approx(full_rate_s)
    assert drain_s <= account["drain"] + 1e-6, "less than the drain itself"
    summed = totals.totals()
    assert (summed.rows_done, summed.rows_reused) == (rows, sum(job.rows_reused for job in last))
    assert summed.rows_error == sum(job.errors["engine_error"] for job in last if job.errors)
    assert sum(own["rows_done"] for own in rates.totals()) == rows
    if not rows:
        return

    work_s = (sum(expected.values()) - expected["start_up"] - expected["no_engine"]) / len(engines)
    work_s = work_s if work_s > 1e-9 else run_s
    summary = Summary(
        rows_in=rows,
        rows_out=rows,
        rows_error=summed.rows_error,
        rows_reused=summed.rows_reused,
        completion_tokens=summed.completion_tokens,
        seconds=run_s,
        rows_per_s=rows / run_s,
        tokens_per_s=summed.completion_tokens / run_s,
        working_rows_per_s=rows / working_seconds(account, seconds=run_s),
        output="t",
        engines=len(engines),
        time_account_s=account,
        drain_at_full_rate_s=drain_s,
    )
    facts = dict(facts_of(summary, Findings(), Prices(per_hour=price)))
    speed = numbers(facts, "Speed")
    assert speed[0] == pytest.approx(rows / run_s, abs=0.051)
    assert speed[2:4] == pytest.approx([run_s, len(engines)], abs=0.051)
    assert speed[4] == pytest.approx(rows / work_s, abs=0.051)
    cost, _, per_million = numbers(facts, "Cost")
    assert cost == pytest.approx(price * run_s / 3600, abs=0.0051)
    assert per_million == pytest.approx(price / 3600 * work_s / rows * 1e6, abs=0.0051)
    if "Drain" in facts:
        share, at_full_rate = numbers(facts, "Drain")
        assert share == pytest.approx(100 * expected["drain"] / (len(engines) * run_s), abs=0.051)
        assert at_full_rate <= share
    page = report_page(RUN, summary, Findings(), {}, {}, prices=Prices(per_hour=price))
    tiles = re.findall(r"<div class='tile'><b>([^<]*)</b><span>([^<]*)</span>", page)
    told = {name: value for value, name in tiles}
    assert told["rows/s at work"] == f"{summary.working_rows_per_s:,.1f}"


def test_samples_of_several_questions_count_rows_as_the_report_does() -> None:
    sample = Sample(
        seconds=1.0,
        rows_done=10,
        rows_error=4,
        completion_tokens=1,
        rows_per_s=6.0,
        tokens_per_s=1.0,
        running_requests=1,
        waiting_requests=1,
        kv_usage=0.0,
        phases="",
        engine_means={},
    )
    of_rows = in_rows(sample, requests_per_row=3)
    assert (of_rows.rows_done, of_rows.rows_error, of_rows.rows_per_s) == (3, 3, 2.0)
    assert in_rows(sample, requests_per_row=1) == sample
