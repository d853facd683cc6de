"""The speed of an earlier run's engines: while they were full, with the bounds that follow from its variation."""

import random
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipemax_spark.report.engine_log import ENGINE_METRICS, SCHEMA
from pipemax_spark.report.run_speed import rate_factor, ratio_interval, speed_of_run
from pipemax_spark.rows.prompt_order import Finding

BEGIN = datetime(2026, 11, 27, tzinfo=UTC)


def reports(
    rows_of_each_s: list[float],
    *,
    server: str = "a",
    waiting: int = 50,
    from_s: int = 0,
    state: str = "ready",
) -> list[dict[str, Any]]:
    """A report a second; ``rows_of_each_s`` are the rows that end in each second after the first report."""
    done = [sum(rows_of_each_s[:count]) for count in range(len(rows_of_each_s) + 1)]
    return [
        {
            "at": BEGIN + timedelta(seconds=from_s + second),
            "server_id": server,
            "state": state,
            "waiting_requests": waiting,
            "rows_done": int(rows),
        }
        for second, rows in enumerate(done)
    ]


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def written(*parts: list[dict[str, Any]]) -> Path:
        (tmp_path / "run").mkdir(exist_ok=True)
        rows = [{**dict.fromkeys(SCHEMA.names), **report} for part in parts for report in part]
        pq.write_table(pa.Table.from_pylist(rows, schema=SCHEMA), tmp_path / "run" / ENGINE_METRICS)
        return tmp_path

    return written


def test_a_steady_run_has_its_rate_and_bounds_that_are_that_rate(write: Any) -> None:
    speed = speed_of_run(write(reports([20.0] * 100)), "run")
    assert (speed.engines, speed.rows_per_s, speed.full_s) == (1, 20.0, 100.0)
    assert speed.interval == (20.0, 20.0)


def test_the_bounds_hold_the_true_rate_in_nearly_all_runs(write: Any) -> None:
    rng = random.Random(1)
    hits = 0
    for _ in range(40):
        speed = speed_of_run(write(reports([float(rng.choice((5, 10, 30))) for _ in range(200)])), "run")
        assert speed.interval is not None
        low, high = speed.interval
        assert low <= speed.rows_per_s <= high
        hits += low <= 15.0 <= high
    assert 34 <= hits <= 40


def test_time_of_loading_and_of_the_drain_does_not_count(write: Any) -> None:
    loading = reports([0.0] * 50, state="loading", waiting=0)
    full = reports([20.0] * 30, from_s=50)
    drain = [
        {**report, "rows_done": 600 + report["rows_done"]}
        for report in reports([2.0] * 50, from_s=81, waiting=0)
    ]
    speed = speed_of_run(write(loading, full, drain), "run")
    assert (speed.rows_per_s, speed.full_s) == (20.0, 30.0)


def test_engines_at_a_time_add_up_and_a_successor_does_not(write: Any) -> None:
    both = [reports([20.0] * 30, server="a"), reports([10.0] * 30, server="b")]
    speed = speed_of_run(write(*both, reports([10.0] * 30, server="b's successor", from_s=31)), "run")
    assert speed.engines == 2
    assert speed.rows_per_s == pytest.approx(2 * (600 + 300 + 300) / 90)


def test_a_run_that_hardly_filled_its_engines_has_a_rate_without_bounds(write: Any) -> None:
    speed = speed_of_run(write(reports([20.0] * 9), reports([10.0] * 9, server="b", waiting=0)), "run")
    assert speed.interval is None
    assert speed.full_s == 9.0
    assert speed.rows_per_s == 2 * (180 + 90) / 18


def test_questions_of_a_row_count_as_one_row(write: Any) -> None:
    speed = speed_of_run(write(reports([20.0] * 30)), "run", requests_per_row=4)
    assert speed.rows_per_s == 5.0


def test_a_run_without_a_record_or_without_rows_has_no_speed(write: Any, tmp_path: Path) -> None:
    assert speed_of_run(tmp_path, "elsewhere") is None
    assert speed_of_run(write(reports([0.0] * 30)), "run") is None
    (tmp_path / "run" / ENGINE_METRICS).write_bytes(b"torn")
    assert speed_of_run(tmp_path, "run") is None


def test_an_interval_is_the_same_each_time_and_wider_for_what_varies_more() -> None:
    even, uneven = [(float(value), 1.0) for value in (9, 10, 11) * 10], [(1.0, 1.0), (19.0, 1.0)] * 15
    assert ratio_interval(even) == ratio_interval(even)
    (low, high), (lower, higher) = ratio_interval(even), ratio_interval(uneven)
    assert lower < low < 10 < high < higher


def test_the_share_of_prompts_is_that_of_the_time_in_which_the_engines_were_full(write: Any) -> None:
    begin = {"time_prefill_s": 9.0, "time_decode_s": 1.0}
    full = reports([20.0] * 100)
    for second, report in enumerate(full):
        report["metrics"] = [
            ("time_prefill_s", 9.0 + 0.2 * second),
            ("time_decode_s", 1.0 + 0.7 * second),
            ("time_prefetch_stall_s", 0.1 * second),
            ("time_drain_s", 5.0),
        ]
    again = reports([20.0] * 20, from_s=101)  # an engine that was started again
    for report in again:
        report |= {"metrics": [*begin.items()], "rows_done": report["rows_done"] + 2_000}
    speed = speed_of_run(write(full, again), "run")
    assert speed.prefill_share == pytest.approx(0.2)
    without = speed_of_run(write(reports([20.0] * 100)), "run")
    assert without.prefill_share is None


@pytest.mark.parametrize(
    ("now", "then", "prefill_share", "factor"),
    [
        (0.0, 0.5, 1.0, 2.0),
        (0.5, 0.75, 0.5, 1 / 0.75),
        (0.0, 1.0, 0.25, 1 / 0.75),
        (0.2, 0.1, 0.5, None),
        (0.0, 0.5, 0.08, None),
        (1.0, 1.0, 0.5, None),
    ],
)
def test_a_finding_is_worth_what_it_leaves_out_of_the_prompts_share_of_the_time(
    now: float, then: float, prefill_share: float, factor: float | None
) -> None:
    finding = Finding(change="", now=now, then=then)
    assert rate_factor(finding, prefill_share) == (None if factor is None else pytest.approx(factor))
