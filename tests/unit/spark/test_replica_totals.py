"""What the driver tells of each replica."""

from dataclasses import replace
from typing import Any

from pipemax.wire import JobStats, ServerStats
from pipemax_spark.report.replica_totals import ReplicaTotals, describe_replica
from pipemax_spark.report.summary import Summary
from tests.fakes.server_reports import server_report


def figures(number: int, rows: int, *, restarts: int = 0, state: str = "up") -> dict[str, Any]:
    tokens = {"prompt_tokens": 10 * rows, "completion_tokens": 5 * rows}
    known = {"replica": number, "gpus": [f"GPU-{number}"], "state": state, "restarts": restarts}
    return {**known, "rows_done": rows, **tokens}


def report(at_s: float, *replicas: dict[str, Any], received: int) -> tuple[ServerStats, JobStats]:
    job = JobStats(rows_received=received)
    return replace(server_report("one", at_s=at_s, job=job), replicas=list(replicas), engine_starts=1), job


def test_a_jobs_own_engine_counts_from_its_start() -> None:
    totals = ReplicaTotals()
    totals.add(*report(1.0, figures(1, 3), figures(2, 4), received=20))
    totals.add(*report(2.0, figures(1, 3, restarts=1, state="starting"), figures(2, 17), received=20))
    rows = [(own["replica"], own["rows_done"], own["restarts"]) for own in totals.totals()]
    assert rows == [(1, 3, 1), (2, 17, 0)]


def test_of_an_older_engine_only_what_it_has_done_since_counts() -> None:
    totals = ReplicaTotals()
    totals.add(*report(1.0, figures(1, 1_000, restarts=2), figures(2, 900), received=20))
    totals.add(*report(2.0, figures(1, 1_012, restarts=2), figures(2, 908), received=20))
    assert [own["rows_done"] for own in totals.totals()] == [12, 8]
    assert [own["seconds"] for own in totals.totals()] == [1.0, 1.0]
    assert [own["completion_tokens"] for own in totals.totals()] == [60, 40]
    assert [own["restarts"] for own in totals.totals()] == [0, 0]


def test_an_engine_without_replicas_has_none() -> None:
    totals = ReplicaTotals()
    totals.add(*report(1.0, received=5))
    assert totals.totals() == []


def test_the_report_has_a_line_for_each_replica() -> None:
    own = {**figures(2, 12_345, restarts=1), "host": "node-7", "seconds": 10.0}
    told = "12,345 rows, 61,725 tokens generated, 1 restart on node-7, GPU GPU-2"
    assert describe_replica(own) == f"6,172 generated tokens/s, {told}"
    dead = {**figures(1, 0, restarts=3, state="given up"), "host": "node-7", "seconds": 0.0}
    assert "given up" in describe_replica(dead)
    text = str(Summary(rows_in=1, rows_skipped=0, output="table", replicas=[dead, own]))
    assert "  replica 1        0 rows" in text
    assert "  replica 2        6,172 generated tokens/s, 12,345 rows" in text
    many = Summary(rows_in=1, rows_skipped=0, output="table", replicas=[own] * 40)
    assert str(many).count("12,345 rows") == 16
    assert "40 in all" in str(many)
