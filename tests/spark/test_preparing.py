"""From a job's start to its first rows: what is left is looked for once, and the engines load meanwhile."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipemax_spark.storage.tables import DeltaTable, Transaction
from tests.fakes.engine_python import write_engine_python
from tests.fakes.settings import fake_config
from tests.spark.conftest import Jobs
from tests.spark.processes import servers_of
from tests.spark.spark_work import counted, set_to
from tests.waiting import wait_until

BROADCAST = "spark.sql.autoBroadcastJoinThreshold"
BY_IDS_AND_BY_ROWS = [("id",), pytest.param((), marks=pytest.mark.long)]


class TableWithCallback(DeltaTable):
    """A Delta table that calls back before the first commit of a run, which is its claim."""

    def __init__(self, spark: Any, name: str, before_claim: Callable[[], None]) -> None:
        super().__init__(spark, name)
        self._before_claim: Callable[[], None] | None = before_claim

    def append(self, rows: Any, transaction: Transaction) -> None:
        before_claim, self._before_claim = self._before_claim, None
        if before_claim is not None:
            before_claim()
        super().append(rows, transaction)


def run_with(run: Jobs, before_claim: Callable[[], None], **changes: Any) -> Any:
    return run.run(table=TableWithCallback(run.spark, run.output, before_claim), **changes)


def loads(jobs: Jobs) -> list[int]:
    """How often each engine server has loaded a model."""
    logs = (jobs.directory / "logs").glob("pipemax-engine-*.log")
    return [log.read_text().count("loading model") for log in logs]


@pytest.mark.long  # speed
@pytest.mark.parametrize(("id_columns", "operator"), [(("id",), "LeftAnti"), ((), "Window")])
def test_few_rows_left_are_searched_for_once(run: Jobs, id_columns: tuple[str, ...], operator: str) -> None:
    rows = [(i, f"word {i}") for i in range(200)]
    run.write_input(rows)
    run.run(id_columns=id_columns)
    # One done row has left the input, so that the counts alone would say less than the truth.
    new = [(200, "new"), (201, "new")] if id_columns else [(200, "new"), (200, "new")]
    run.write_input([*rows[1:], *new])
    with counted(run.spark) as work:
        summary = run.run(id_columns=id_columns)
    assert (summary.rows_skipped, summary.rows_out) == (199, 2)
    assert work.plans_with(operator) == 1
    done = sorted([*range(200), *(number for number, _ in new)])
    assert sorted(row["id"] for row in run.rows()) == done


@pytest.mark.parametrize("id_columns", BY_IDS_AND_BY_ROWS)
def test_a_row_that_is_done_between_the_search_and_the_claim_is_not_done_again(
    run: Jobs, id_columns: tuple[str, ...]
) -> None:
    rows = [(i, f"word {i}") for i in range(200)]
    run.write_input(rows)
    run.run(id_columns=id_columns)
    run.write_input([*rows[1:], (300, "word 300"), (301, "word 301")])

    def commit_elsewhere() -> None:
        table = run.spark.read.format("delta").load(run.output)
        row = table.where("id = 0").selectExpr("301L AS id", "'word 301' AS text", "annotation")
        row.write.format("delta").mode("append").save(run.output)

    summary = run_with(run, commit_elsewhere, id_columns=id_columns)
    assert (summary.rows_in, summary.rows_skipped, summary.rows_out) == (201, 200, 1)
    assert sorted(row["id"] for row in run.rows()) == [*range(200), 300, 301]


@pytest.mark.long  # speed
def test_engines_load_before_the_rows_are_written_down_and_only_for_rows(run: Jobs, tmp_path: Path) -> None:
    run.write_input([(i, f"word {i}") for i in range(20)])
    engine_python = write_engine_python(tmp_path / "python")
    run.dry_run(engine_python=engine_python)
    assert not servers_of(engine_python), "a dry run starts no engine"
    servers = []

    def wait_for_engine() -> None:
        wait_until(lambda: bool(servers_of(engine_python)), 120, "an engine server starts before the claim")
        servers.extend(servers_of(engine_python))

    summary = run_with(run, wait_for_engine, engine_python=engine_python)
    assert (summary.rows_out, summary.engines) == (20, 1)
    assert list(servers_of(engine_python)) == servers, (
        "the rows were done by the engine that was started early"
    )

    other = write_engine_python(tmp_path / "other")
    again = run.run(engine_python=other)
    assert (again.rows_out, again.rows_skipped) == (0, 20)
    assert not servers_of(other), "a run with nothing to do starts no engine"


def test_an_engine_that_cannot_start_ends_the_job_with_its_cause_after_one_attempt(
    run: Jobs, tmp_path: Path
) -> None:
    run.write_input([(i, f"word {i}") for i in range(20)])
    engine = fake_config(start_error="the GPU has 3 GiB free, the model needs 5")
    with pytest.raises(Exception, match="the GPU has 3 GiB free, the model needs 5"):
        run.run(engine=engine, engine_python=write_engine_python(tmp_path / "python"))
    assert loads(run) == [1]
    assert run.rows() == []


@pytest.mark.long  # speed
@pytest.mark.parametrize("id_columns", BY_IDS_AND_BY_ROWS)
def test_a_night_shuffles_its_own_rows_only_and_engines_load_meanwhile(
    run: Jobs, tmp_path: Path, id_columns: tuple[str, ...]
) -> None:
    source, engine_python = str(tmp_path / "in"), write_engine_python(tmp_path / "python")
    table = run.spark.range(3_000).selectExpr("id", "concat('word ', id) AS text")
    table.write.format("delta").save(source)
    run.run(input=source, incremental=True, id_columns=id_columns)
    table.selectExpr("id + 3000 AS id", "text").limit(20).write.format("delta").mode("append").save(source)

    def check_engine() -> None:
        if id_columns:
            wait_until(
                lambda: bool(servers_of(engine_python)), 60, "an engine server starts before the claim"
            )

    options = {"input": source, "incremental": True, "id_columns": id_columns}
    # As where all ids ever done are too many for a broadcast.
    with set_to(run.spark, {BROADCAST: "-1"}), counted(run.spark) as work:
        summary = run_with(run, check_engine, engine_python=engine_python, **options)
    assert (summary.rows_in, summary.rows_skipped, summary.rows_out) == (20, 0, 20)
    assert work.rows_read > 3_000, "the night's rows are compared with all that were done"
    assert work.rows_shuffled < 1_500
