"""What a report says of each replica, computed again from what the replicas did."""

import re
from collections import Counter
from dataclasses import dataclass
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from pipemax.wire import JobStats
from pipemax_spark.report.engine_rates import ReplicaTotals, describe_replica
from pipemax_spark.report.summary import Summary
from tests.fakes.server_reports import server_report

REPLICAS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What one replica does for a second, and whether a report follows."""

    replica: int
    rows: int
    tokens: int
    dies: bool
    is_reported: bool


works = st.builds(
    Work,
    replica=st.integers(0, REPLICAS - 1),
    rows=st.integers(0, 20),
    tokens=st.integers(0, 1000),
    dies=st.booleans(),
    is_reported=st.booleans(),
)


@given(before=st.lists(works, max_size=4), since=st.lists(works, min_size=1, max_size=8))
def test_the_counts_of_a_replica_are_those_since_the_job_heard_of_an_older_engine(
    before: list[Work], since: list[Work]
) -> None:
    """``before`` is done for other jobs: of an engine that is older than the job, the first report is the beginning."""
    totals, counts, done_of_job = ReplicaTotals(), [Counter[str]() for _ in range(REPLICAS)], 0
    heard: list[tuple[float, list[Counter[str]]]] = []
    for at_s, work in enumerate([*before, *since]):
        counts[work.replica].update(rows_done=work.rows, completion_tokens=work.tokens, restarts=work.dies)
        if at_s < len(before):
            continue
        done_of_job += work.rows
        if not work.is_reported and at_s < len(before) + len(since) - 1:
            continue
        heard.append((float(at_s), [Counter(own) for own in counts]))
        replicas = [
            {
                "replica": number,
                "gpus": [],
                "state": "up",
                "rows_done": own["rows_done"],
                "prompt_tokens": 3 * own["rows_done"],
                "completion_tokens": own["completion_tokens"],
                "restarts": own["restarts"],
            }
            for number, own in enumerate(counts)
        ]
        job = JobStats(rows_received=done_of_job, rows_done=done_of_job)
        totals.add(server_report("e", at_s=float(at_s), job=job, engine_starts=1, replicas=replicas), job)

    (first_s, first), (last_s, last) = heard[0], heard[-1]
    is_older = any(work.rows for work in before)
    told = totals.totals()
    assert [own["replica"] for own in told] == [0, 1, 2]
    for own, begin, end in zip(told, first, last, strict=True):
        for name in ("rows_done", "completion_tokens", "restarts"):
            assert own[name] == end[name] - (begin[name] if is_older else 0), name
        assert own["prompt_tokens"] == 3 * own["rows_done"]
        assert own["seconds"] == last_s - first_s
        words = describe_replica(own)
        numbers = [int(number.replace(",", "")) for number in re.findall(r"\d[\d,]*", words)]
        rate = [round(own["completion_tokens"] / own["seconds"])] if own["seconds"] else []
        restarts = [own["restarts"]] if own["restarts"] else []
        assert numbers == [*rate, own["rows_done"], own["completion_tokens"], *restarts], words


def figures(number: int, rows: int, *, restarts: int = 0, state: str = "up") -> dict[str, Any]:
    tokens = {"prompt_tokens": 10 * rows, "completion_tokens": 5 * rows}
    known = {"replica": number, "gpus": [f"GPU-{number}"], "state": state, "restarts": restarts}
    return {**known, "rows_done": rows, **tokens}


def test_an_engine_without_replicas_has_none() -> None:
    totals, job = ReplicaTotals(), JobStats(rows_received=5)
    totals.add(server_report("e", job=job), job)
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
