"""The report tells how fast each engine was, and which machine failed."""

from typing import Any

from pipemax.wire import JobStats
from pipemax_spark.report.engine_rates import EngineRates
from pipemax_spark.report.summary import Summary
from tests.fakes.server_reports import server_report


def take(rates: EngineRates, server: str, at_s: float, received: int, done: int, **fields: Any) -> None:
    """A row has five tokens."""
    job = JobStats(rows_received=received, rows_done=done, completion_tokens=5 * done)
    rates.add(server_report(server, at_s=at_s, job=job, **fields), job)


def text(rates: EngineRates) -> str:
    return str(Summary(rows_in=1, rows_skipped=0, output="table", engine_rates=rates.totals()))


def test_a_rate_counts_the_time_from_an_engine_s_first_row_to_its_last() -> None:
    rates = EngineRates()
    take(rates, "one", 0.0, received=0, done=0, state="loading")
    take(rates, "one", 100.0, received=0, done=0)
    take(rates, "one", 101.0, received=60, done=0)
    take(rates, "one", 110.0, received=60, done=60)
    take(rates, "one", 500.0, received=60, done=60)  # other engines still work
    (own,) = rates.totals()
    assert (own["tokens_per_s"], own["rows_per_s"], own["rows_done"]) == (30.0, 6.0, 60)
    assert "engine" not in text(rates), "nothing to compare it with"


def test_a_slow_gpu_comes_first_in_the_report() -> None:
    rates = EngineRates()
    for server, done in (("one", 100), ("two", 50), ("three", 90)):
        take(rates, server, 0.0, received=0, done=0, gpus=[f"GPU-{server}"])
        take(rates, server, 10.0, received=done, done=done, gpus=[f"GPU-{server}"])
    assert [own["gpus"] for own in rates.totals()] == [["GPU-two"], ["GPU-three"], ["GPU-one"]]
    told = "25 generated tokens/s, 5.0 rows/s, 50 rows on h, GPU GPU-two"
    assert f"  slowest engine   {told}" in text(rates)


def test_servers_that_an_executor_has_had_are_one_engine_whose_faults_are_told() -> None:
    rates = EngineRates()
    fault = "CUDA error: uncorrectable ECC error encountered"
    for server, at_s in (("first", 0.0), ("second", 20.0)):
        take(rates, server, at_s, received=0, done=0, gpus=["GPU-a"])
        take(rates, server, at_s + 10.0, received=40, done=40, gpus=["GPU-a"])
    take(rates, "first", 11.0, received=60, done=40, gpus=["GPU-a"], state="stopping", machine_fault=fault)
    (own,) = rates.totals()
    assert (own["rows_done"], own["rows_per_s"], own["machine_faults"]) == (80, 4.0, [fault])
    assert f"GPU GPU-a, its machine failed once: {fault}" in text(rates)


def test_without_gpus_each_server_counts_as_one() -> None:
    rates = EngineRates()
    for server in ("one", "two"):
        take(rates, server, 0.0, received=0, done=0)
        take(rates, server, 10.0, received=10, done=10)
    assert [own["gpus"] for own in rates.totals()] == [[], []]
    assert text(rates).count("rows on h") == 2
