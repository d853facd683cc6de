"""What fits under the limits of a run: forecasts, the size of the next chunk, and what a user is told."""

import math
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipemax.wire import GenerationSpec, PreflightReply
from pipemax_spark.cli import exit_status
from pipemax_spark.errors import EndedBy, JobError, LimitReachedError
from pipemax_spark.job.limits import LIMITS, RunLimits, forecast_lines, limits_of, prior_of, read_done_by
from pipemax_spark.options import JobOptions
from pipemax_spark.report.run_speed import RunSpeed
from pipemax_spark.report.summary import Summary
from pipemax_spark.request.prices import Prices
from pipemax_spark.request.prompts import PromptSource
from pipemax_spark.rows.budget import (
    Interval,
    Limit,
    Pace,
    Prior,
    Sample,
    forecast,
    most_rows,
    ratio_of,
    reached,
)
from pipemax_spark.rows.chunks import ChunkPlan

NOW = datetime(2026, 11, 27, 22, 0, tzinfo=UTC)
HOUR = Limit(ended_by=EndedBy.MAX_HOURS, text="max-hours 1", seconds=3_600.0)
TOKENS = Limit(ended_by=EndedBy.MAX_TOKENS_TOTAL, text="max-tokens-total 1,000,000", tokens=1_000_000)


def options(**changes: Any) -> JobOptions:
    return JobOptions(
        **{
            "input": "in",
            "output": "out",
            "source": PromptSource(template="{text}"),
            "engine": {"model": "m"},
            "generation": GenerationSpec(),
            "log_dir": Path("logs"),
            **changes,
        }
    )


def pace_of(rate: float, until_s: float, *, tokens: int = 100, noise: float = 0.0) -> Pace:
    """Of rows that were done at this rate from second 0 on, each of so many tokens."""
    pace, rows, random = Pace(), 0.0, Random(0)
    for second in range(1, int(until_s) + 1):
        rows += rate * max(0.0, random.gauss(1.0, noise))
        pace.add(Sample(seconds=float(second), rows=int(rows), tokens=int(rows) * tokens))
    return pace


def test_the_rows_that_may_begin_are_those_that_are_forecast_to_fit() -> None:
    pace = pace_of(10.0, 1_800)
    fitting = 10 * (3_600 - 1_800 - pace.lag_s)
    assert most_rows([HOUR], pace) == pytest.approx(fitting, rel=0.01)
    pace.begin(18_000 + 5_000)
    assert most_rows([HOUR], pace) == pytest.approx(fitting - 5_000, rel=0.01)
    assert most_rows([HOUR], pace, now_s=2_000.0) == pytest.approx(fitting - 7_000, rel=0.01)
    assert most_rows([], pace) is None


def test_near_the_limit_no_chunk_may_begin() -> None:
    assert most_rows([HOUR], pace_of(10.0, 3_500)) == pytest.approx(10 * 40, rel=0.05)
    assert most_rows([HOUR], pace_of(10.0, 3_545)) == 0, "a minute is kept for last rows and the commit"


def test_a_chunk_has_half_of_the_rows_that_fit_or_a_slice() -> None:
    plan = ChunkPlan(slice_rows=[100] * 100, slots=1, commit_every_s=10.0)
    sizes = [plan.next(1_000.0, at_least=400, at_most=most) for most in (1_000, 500, 250, 199, 100, 99)]
    assert [chunk and chunk.rows for chunk in sizes] == [500, 200, 100, 100, 100, None]
    assert not plan.is_used_up


def test_the_time_that_commits_took_after_their_rows_were_done_is_kept_for_the_next_ones() -> None:
    pace = pace_of(10.0, 1_000)
    pace.commit(1_000.0, pace.begin(6_000))  # done after 600 s
    assert pace.lag_s == pytest.approx(400.0, abs=1.0)
    for _ in range(7):
        pace.commit(1_000.0, pace.begin(100))
    assert pace.lag_s == pytest.approx(390.0, abs=1.0), "a single straggler among eight does not count"


def test_the_next_chunk_goes_by_the_recent_rate() -> None:
    pace, rows = Pace(), 0
    for second in range(1, 3_001):
        rows += 30 if second <= 1_500 else 10
        pace.add(Sample(seconds=float(second), rows=rows, tokens=0))
    recent, to_come = pace.rows_per_s(), pace.rows_per_s_to_come()
    assert recent is not None
    assert to_come is not None
    assert recent.low == recent.high == pytest.approx(10.0)
    assert to_come.middle == pytest.approx(10.0)
    assert to_come.high > 20.0, "what was once may come again"


def test_with_tokens_the_rows_in_flight_count_before_they_are_done() -> None:
    pace = pace_of(10.0, 500)  # 500,000 tokens of 5,000 rows
    assert most_rows([TOKENS], pace) == pytest.approx(5_000, rel=0.01)
    pace.begin(9_000)
    assert most_rows([TOKENS], pace) == pytest.approx(1_000, rel=0.01)
    pace.begin(2_000)
    assert most_rows([TOKENS], pace) == 0
    assert most_rows([HOUR, TOKENS], pace) == 0, "the limit that leaves less decides"


def test_without_any_rate_chunks_begin_in_the_first_half_of_the_time() -> None:
    pace = Pace()
    pace.add(Sample(seconds=1_799.0, rows=0, tokens=0))
    assert most_rows([HOUR], pace) is None
    pace.add(Sample(seconds=1_800.0, rows=0, tokens=0))
    assert most_rows([HOUR], pace) == 0
    prior = Prior(rows_per_s=Interval(low=8.0, middle=10.0, high=12.0))
    assert most_rows([HOUR], pace, prior) == pytest.approx(8 * 1_740, rel=0.01)


def test_what_little_was_seen_is_not_taken_for_the_night() -> None:
    assert forecast([HOUR], pace_of(10.0, 180)) is None, "a twentieth of the limit is too little"
    assert forecast([HOUR], pace_of(10.0, 182)) is not None
    assert forecast([TOKENS], pace_of(10.0, 119)) is None
    outlook = forecast([HOUR], pace_of(10.0, 600, noise=0.5))
    assert outlook is not None
    assert outlook.rows.low < 36_000 < outlook.rows.high
    assert outlook.rows.middle == pytest.approx(36_000, rel=0.1)


@given(st.integers(5, 20), st.floats(0.1, 100.0), st.floats(0.0, 0.5), st.randoms(use_true_random=False))
def test_an_interval_holds_the_ratio_and_is_as_wide_as_the_pairs_vary(
    count: int, rate: float, spread: float, random: Random
) -> None:
    pairs = [(rate * seconds * (1 + random.uniform(-spread, spread)), seconds) for seconds in [45.0] * count]
    interval = ratio_of(pairs)
    assert interval is not None
    assert 0 <= interval.low <= interval.middle <= interval.high
    assert interval.high - interval.middle <= rate * (3.1 * spread + 1e-9)
    assert ratio_of(pairs[:4]) is None


def test_most_intervals_hold_the_true_rate() -> None:
    random = Random(0)
    held = 0
    for _ in range(1_000):
        interval = ratio_of([(random.gauss(450.0, 60.0), 45.0) for _ in range(8)])
        assert interval is not None
        held += interval.low <= 10.0 <= interval.high
    assert 930 <= held <= 970


@given(
    st.lists(st.integers(0, 50), min_size=1, max_size=60),
    st.lists(st.integers(0, 200) | st.none(), min_size=1),
)
def test_no_chunk_has_more_rows_than_it_may(slice_rows: list[int], most: list[int | None]) -> None:
    plan = ChunkPlan(slice_rows=slice_rows, slots=1, commit_every_s=10.0)
    for at_most in most:
        chunk = plan.next(3.0, at_least=40, at_most=at_most)
        assert chunk is None or at_most is None or 0 < chunk.rows <= at_most
    while plan.next(3.0) is not None:
        pass
    assert plan.is_used_up
    assert sum(chunk.rows for chunk in plan.chunks) == sum(slice_rows)


def test_samples_of_a_long_run_are_thinned_and_its_rate_stays() -> None:
    pace = pace_of(2.0, 10_000)
    assert len(pace._samples) <= 2_001
    rate = pace.rows_per_s()
    assert rate is not None
    assert rate.middle == pytest.approx(2.0, rel=0.01)


def test_a_limit_is_reached_in_time_or_in_tokens() -> None:
    assert reached([HOUR, TOKENS], Sample(seconds=3_599.0, rows=1, tokens=999_999)) is None
    assert reached([HOUR, TOKENS], Sample(seconds=3_600.0, rows=1, tokens=0)) == HOUR
    assert reached([HOUR, TOKENS], Sample(seconds=1.0, rows=1, tokens=1_000_000)) == TOKENS


# The job's options and sentences.


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"max_cost": 200.0}, "--max-cost needs --price-per-hour"),
        ({"max_cost": 200.0, "price_per_hour": 0.0}, "--max-cost needs --price-per-hour"),
        ({"max_cost": 0.0, "price_per_hour": 1.0}, "max-cost is 0.0; give a number above 0"),
        ({"max_hours": math.inf}, "max-hours is inf; give a number above 0"),
        ({"max_tokens_total": -1}, "max-tokens-total is -1; give a number above 0"),
    ],
)
def test_a_limit_that_cannot_be_kept_is_refused(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(JobError, match=told):
        options(**changes)


def test_limits_count_from_the_job_s_start() -> None:
    by_six = datetime(2026, 11, 28, 6, 0, tzinfo=UTC)
    limits = limits_of(
        options(max_cost=200.0, price_per_hour=80.0, max_hours=6.0, done_by=by_six, max_tokens_total=10),
        now=NOW,
    )
    assert [(limit.text, limit.seconds, limit.tokens) for limit in limits] == [
        ("max-cost 200", 9_000.0, None),
        ("max-hours 6", 21_600.0, None),
        ("done-by 06:00", 28_800.0, None),
        ("max-tokens-total 10", None, 10),
    ]
    assert {limit.ended_by for limit in limits} == LIMITS
    with pytest.raises(JobError, match=r"done-by \d\d:\d\d has passed"):
        limits_of(options(done_by=NOW), now=NOW)


def test_a_time_without_a_date_is_the_next_one() -> None:
    evening = datetime(2026, 11, 27, 22, 0).astimezone()
    assert read_done_by("06:00", now=evening) == datetime(2026, 11, 28, 6, 0).astimezone()
    assert read_done_by("22:01", now=evening) == datetime(2026, 11, 27, 22, 1).astimezone()
    assert read_done_by("22:00", now=evening) == datetime(2026, 11, 28, 22, 0).astimezone()
    assert read_done_by("2026-12-01T06:00") == datetime(2026, 12, 1, 6, 0).astimezone()
    assert read_done_by("2026-12-01T06:00+00:00") == datetime(2026, 12, 1, 6, 0, tzinfo=UTC)
    assert read_done_by(datetime(2026, 12, 1, 6, 0)).tzinfo is not None
    for wrong in ("tomorrow", "25:00", "", "6"):
        with pytest.raises(JobError, match=r"done-by is '.*'; write a time such as 06:00"):
            read_done_by(wrong)


class Evening:
    """The limits of a run at a clock that the test sets."""

    def __init__(self, rows: int, **limits: Any) -> None:
        self.now_s = 1_000.0
        self.limits = RunLimits(options(**limits), clock_s=lambda: self.now_s, now=NOW)
        self.limits.expect(rows)
        self.warnings: list[str] = []

    def goes_on(self, rate: float, until_s: int, *, tokens: int = 100) -> LimitReachedError | None:
        """Let rows be done at this rate until so many seconds after the job's start; return what ended the run."""
        begin_s = int(self.now_s) - 1_000
        for second in range(begin_s, until_s + 1):
            self.now_s = 1_000.0 + second
            rows = int(rate * second)
            end = self.limits.look(rows=rows, tokens=rows * tokens, warn=self.warnings.append)
            if end is not None:
                return end
        return None


def test_what_will_not_fit_is_told_early_and_once() -> None:
    evening = Evening(100_000, max_cost=200.0, price_per_hour=80.0)
    assert evening.goes_on(5.0, 119) is None
    assert evening.warnings == [], "too little is known"
    assert evening.goes_on(5.0, 1_000) is None
    [warning] = evening.warnings
    told = r"at this rate 45% of the rows .* the limit \(max-cost 200, at 00:30\): 55,000 rows will be left \([\d,]+ to"
    assert re.match(told, warning)
    assert evening.limits.left_text() == "177.78 of max-cost 200 left · about 45% of the rows by then"


def test_for_a_time_it_is_told_how_many_engines_would_do() -> None:
    evening = Evening(100_000, done_by=NOW + timedelta(hours=2.5))
    assert evening.goes_on(5.0, 1_000) is None
    [warning] = evening.warnings
    assert re.search(r"\(done-by 00:30\): .* left .*\. 2\.\d times the engines would do all$", warning)


def test_a_table_that_fits_is_not_warned_of() -> None:
    evening = Evening(40_000, max_hours=2.5)
    assert evening.goes_on(5.0, 1_000) is None
    assert evening.warnings == []
    assert evening.limits.left_text() == "2:13:20 left of max-hours 2.5"


def test_the_end_at_a_limit_says_what_was_used() -> None:
    evening = Evening(100_000, max_cost=1.0, price_per_hour=2.0)
    end = evening.goes_on(5.0, 10_000)
    assert end is not None
    assert end.ended_by is EndedBy.MAX_COST
    assert str(end) == "--max-cost 1 is reached"
    assert evening.limits.used() == "30 min since the job's start, cost 1.00, 900,000 tokens"
    assert evening.limits.most_rows() == 0

    evening = Evening(100_000, max_tokens_total=5_000)
    end = evening.goes_on(5.0, 1_000)
    assert end is not None
    assert end.ended_by is EndedBy.MAX_TOKENS_TOTAL


def test_the_limit_that_leaves_least_is_named_when_no_chunk_fits() -> None:
    evening = Evening(100_000, max_hours=1.0, max_tokens_total=100_000_000)
    assert evening.goes_on(10.0, 3_590) is None
    assert evening.limits.most_rows() == 0
    assert evening.limits.none_fits().ended_by is EndedBy.MAX_HOURS
    assert "max-hours 1 leaves too little for another chunk" in str(evening.limits.none_fits())
    evening = Evening(100_000, max_hours=10.0, max_tokens_total=1_000_000)
    assert evening.goes_on(10.0, 600) is None
    evening.limits.begun(0, 11_000)
    assert evening.limits.most_rows() == 0
    assert evening.limits.none_fits().ended_by is EndedBy.MAX_TOKENS_TOTAL


def test_without_limits_nothing_is_held_back() -> None:
    evening = Evening(100_000)
    assert evening.goes_on(10.0, 600) is None
    assert (evening.limits.most_rows(), evening.limits.longest_chunk_s()) == (None, None)
    assert evening.limits.left_text() == ""


def test_a_forecast_at_the_start_says_what_fits_and_what_would_help() -> None:
    speed = RunSpeed(run_id="R", engines=2, rows_per_s=10.0, full_s=60.0, interval=(9.0, 11.0))
    reply = PreflightReply(prompt_tokens=[40, 60], output_tokens=[100, 100])
    limits = limits_of(
        options(
            max_cost=1.0, price_per_hour=1.0, done_by=NOW + timedelta(hours=1), max_tokens_total=1_000_000
        ),
        now=NOW,
    )

    def lines(rows: int, known: RunSpeed | None = speed) -> list[str]:
        prior = prior_of(known, reply, requests_per_row=1, prices=Prices())
        return forecast_lines(limits, prior, rows, now=NOW, speed=known)

    by = "at the rate of run R, without the engines' start"
    assert lines(72_000) == [
        f"max-cost 1, at 23:00: about 50% of 72,000 rows fit {by}; 36,000 rows will be left (32,400 to 39,600)",
        f"done-by 23:00: about 50% of 72,000 rows fit {by}; 36,000 rows will be left (32,400 to 39,600). "
        "What would help: 5 such engines in place of 2, or shorter answers",
        "max-tokens-total 1,000,000: at most 28% of 72,000 rows fit: the prompts alone have more tokens",
    ]
    assert lines(36_000)[0] == f"max-cost 1, at 23:00: 36,000 rows may fit or not {by}: 32,400 to 39,600 do"
    assert lines(5_000)[1:] == [
        f"done-by 23:00: all 5,000 rows fit {by}",
        "max-tokens-total 1,000,000: all 5,000 rows fit, even with the longest answers",
    ]
    assert lines(10_000)[2] == (
        "max-tokens-total 1,000,000: 6,667 of 10,000 rows fit with the longest answers, more with shorter ones"
    )
    assert lines(5_000, None)[1] == (
        "done-by 23:00: no forecast before the first rows are done: no earlier run of this job with full engines "
        "tells it"
    )


@pytest.mark.parametrize("ended_by", EndedBy)
def test_only_a_limit_ends_with_status_3_and_with_0_if_that_is_a_success(ended_by: EndedBy) -> None:
    summary = Summary(rows_in=1, output="t", ended_by=str(ended_by))
    assert exit_status(summary, options()) == (3 if ended_by in LIMITS else 0)
    assert exit_status(summary, options(budget_is_success=True)) == 0
    assert exit_status(None, options(dry_run=True)) == 0
